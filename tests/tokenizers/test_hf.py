"""Folders of Hugging Face's tokenizers give the ids that `AutoTokenizer` gives, in both directions."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from slow_tokenizers import SENTENCES
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, load_tokenizer

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

HARD = [
    *SENTENCES,
    "Hello  world\n\n  x",
    "naïve café",
    "你好，世界！１２３",
    "😀👩‍👩‍👧 emoji",
    "12345 67",
    "</s> spelt <s> out <|endoftext|>",
    "tab\tsep\r\n",
    " ",
    "\n\n \u3000",
]


def byte_level() -> dict:
    """As GPT-2, Qwen and LLaMA 3 have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        HARD, trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, special_tokens=["<|endoftext|>"])
    )
    return {"tokenizer_object": made, "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}


def pieces_and_bytes() -> dict:
    """As LLaMA 1 and 2 and Mistral have it: pieces with a sign for the space, bytes for the rest, <s> in front."""
    made = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.train_from_iterator(HARD[:5], trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"]))
    content = json.loads(made.to_str())
    vocab = content["model"]["vocab"]
    vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
    made = Tokenizer.from_str(json.dumps(content))
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return {"tokenizer_object": made, "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.fixture(scope="module", params=[byte_level, pieces_and_bytes])
def folder(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(**request.param()).save_pretrained(folder)
    return folder


def test_ids_and_texts_are_those_of_auto_tokenizer(folder, tmp_path) -> None:
    """Of the one that was built, of one that was saved, and of one on its way to a worker process."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    built = build_tokenizer("hf", path=folder)
    built.save(tmp_path)
    for ours in (built, load_tokenizer(tmp_path), pickle.loads(pickle.dumps(built))):
        for text, batched in zip(HARD, ours.encode_batch(HARD), strict=True):
            ids = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            assert ours.encode(text) == batched == ids
            assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        assert (ours.special.bos, ours.special.eos) == (theirs.bos_token_id, theirs.eos_token_id)
        assert ours.vocab_size == len(theirs)
        assert list(ours.prompt_prefix) + ours.encode("a b") == theirs("a b")["input_ids"]
        assert ours.encode(f"a{theirs.eos_token}", command_tokens=True)[-1] == theirs.eos_token_id


def unigram() -> Tokenizer:
    """As T5, ALBERT and XLM-RoBERTa have it: special tokens are pieces of the model."""
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    special = ["<pad>", "</s>", "<unk>"]
    made.train_from_iterator(HARD, trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>"))
    made.add_tokens(["<new>"])
    return made


def whole_words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "</s>": 1, "a": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens(["</s>", "[UNK]"])
    made.add_tokens(["<new>"])
    return made


@pytest.mark.parametrize("made", [unigram, whole_words])
def test_a_special_token_that_is_a_piece_of_the_model_stays_text_in_a_corpus(tmp_path, made) -> None:
    made().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    built = build_tokenizer("hf", path=tmp_path)
    end, new = built.special.eos, built.vocab_size - 1
    for ours in (built, pickle.loads(pickle.dumps(built))):
        for text in ("a </s> <new>", "</s>", "a", "<new> a"):
            ids = ours.encode(text)
            assert ours.encode_batch([text]) == [ids]
            assert end not in ids
            assert ids.count(new) == text.count("<new>")
            assert ours.encode(text, command_tokens=True).count(end) == text.count("</s>")
    assert made is whole_words or built.decode(built.encode("a </s> b")) == "a </s> b"


def without_unknown(folder: Path) -> None:
    words = Tokenizer(models.WordLevel({"b": 0}, unk_token="?"))
    (folder / "tokenizer.json").write_text(words.to_str())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "holds no tokenizer: no tokenizer.json, vocab.txt"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            "is not a tokenizer that the library tokenizers",
        ),
        (without_unknown, "Missing"),
        (lambda folder: (folder / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json: "),
    ],
)
def test_mistakes_name_the_file(tmp_path, change, message) -> None:
    transformers.PreTrainedTokenizerFast(**byte_level()).save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError, match=message):
        build_tokenizer("hf", path=tmp_path)


def test_gpt2s_published_folders_name_no_end_token(tmp_path) -> None:
    byte_level()["tokenizer_object"].save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"model_max_length": 1024}')
    found = build_tokenizer("hf", path=tmp_path)
    assert found.token_text(found.special.eos) == "<|endoftext|>"
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    other = build_tokenizer("hf", path=tmp_path)
    assert other.token_text(other.special.eos) == "a"


def test_a_layout_of_special_tokens_is_refused(folder) -> None:
    with pytest.raises(UserError, match="`special_tokens` with_end: the tokenizer hf has those of its file"):
        build_tokenizer("hf", path=folder, special_tokens="with_end")
