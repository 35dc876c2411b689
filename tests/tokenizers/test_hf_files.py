"""Folders of Hugging Face's older tokenizers, which hold vocabulary files and no tokenizer.json."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import sentencepiece
from test_hf import HARD
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer
from tokenizers.models import Unigram

from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, load_tokenizer, train_sentencepiece
from ftk.tokenizers.grow import grow_tokenizer
from ftk.tokenizers.hf_files import why_unreadable
from ftk_cli.preprocess import main as preprocess

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

TEXTS = [
    *HARD,
    "an <|extra_1|> token",
    "[MASK] and <mask> and <extra_id_0> stay text [SEP]",
    "Καλημέρα ΣΊΣΥΦΟΣ",
    "don't  stop ...\n",
]


def word_pieces(folder: Path, **config: Any) -> None:
    made = BertWordPieceTokenizer(lowercase=config.get("do_lower_case", True))
    made.train_from_iterator(TEXTS, vocab_size=250, show_progress=False)
    made.save_model(str(folder))
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def byte_pairs(folder: Path, kind: str, specials: list[str], **config: Any) -> None:
    made = ByteLevelBPETokenizer()
    made.train_from_iterator(TEXTS, vocab_size=400, show_progress=False, special_tokens=specials)
    made.save_model(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def bert_uncased(folder: Path) -> None:
    word_pieces(folder)


def bert_cased(folder: Path) -> None:
    word_pieces(folder, do_lower_case=False, model_max_length=512)


def gpt2(folder: Path) -> None:
    byte_pairs(folder, "gpt2", ["<|endoftext|>"])


def gptj_with_added_tokens(folder: Path) -> None:
    byte_pairs(folder, "gptj", ["<|endoftext|>"], tokenizer_class="GPT2Tokenizer")
    size = len(json.loads((folder / "vocab.json").read_text()))
    (folder / "added_tokens.json").write_text(json.dumps({"<|extra_1|>": size, "<|extra_2|>": size + 1}))


def gpt2_with_a_special_word(folder: Path) -> None:
    """Of the vocabulary; and no file names the token in front of texts."""
    more = {"additional_special_tokens": ["<|extra_1|>"], "add_bos_token": True}
    byte_pairs(folder, "gpt2", ["<|endoftext|>", "<|extra_1|>"], **more)


def opt(folder: Path) -> None:
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    byte_pairs(folder, "opt", ROBERTA[:4], tokenizer_class="GPT2Tokenizer", add_bos_token=True, **named)


def opt_with_a_mask(folder: Path) -> None:
    """Of RoBERTa's vocabulary, which the class does not name."""
    named = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>"}
    byte_pairs(folder, "opt", ROBERTA, tokenizer_class="GPT2Tokenizer", add_bos_token=True, **named)


def gpt2_with_another_end(folder: Path) -> None:
    byte_pairs(folder, "gpt2", ["<|endoftext|>", "</s>"], eos_token="</s>", add_bos_token=True)


def gpt2_without_its_token(folder: Path) -> None:
    byte_pairs(folder, "gpt2", ["</s>"], eos_token="</s>", add_bos_token=True)


def roberta(folder: Path) -> None:
    byte_pairs(folder, "roberta", ROBERTA)


def bart(folder: Path) -> None:
    byte_pairs(folder, "bart", ROBERTA, tokenizer_class="BartTokenizer", model_max_length=1024)


def longformer(folder: Path) -> None:
    byte_pairs(folder, "longformer", ROBERTA, add_prefix_space=True)


FOLDERS = [
    bert_uncased,
    bert_cased,
    gpt2,
    gptj_with_added_tokens,
    gpt2_with_a_special_word,
    gpt2_with_another_end,
    opt,
    opt_with_a_mask,
    roberta,
    bart,
    longformer,
]


def made(tmp_path: Path, write: Callable[[Path], None]) -> Path:
    folder = tmp_path / write.__name__
    folder.mkdir()
    write(folder)
    return folder


def their_ids(theirs: Any, text: str, **options: Any) -> list[int]:
    return theirs(text, **options)["input_ids"]


@pytest.mark.parametrize("write", FOLDERS)
def test_ids_are_those_of_auto_tokenizer(write, tmp_path) -> None:
    """Of the one that was built, of one that was saved, and of one on its way to a worker process."""
    folder = made(tmp_path, write)
    assert not (folder / "tokenizer.json").exists()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    built = build_tokenizer("hf", path=folder)
    built.save(tmp_path / "saved")
    for ours in (built, load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(built))):
        for text, batched in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
            ids = their_ids(theirs, text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode(text) == batched == ids
            assert ours.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False)
        for role in ("eos", "pad", "mask", "cls", "sep"):
            expected = getattr(theirs, f"{role}_token_id")
            assert expected is None or getattr(ours.special, role) == expected
        assert ours.vocab_size == len(theirs)
        start = [*ours.prompt_prefix, *ours.encode("a b")]  # behind it they put [SEP]
        assert their_ids(theirs, "a b")[: len(start)] == start
        prompt = ours.encode("an <|extra_1|> token", command_tokens=True)
        assert prompt == their_ids(theirs, "an <|extra_1|> token", add_special_tokens=False)
        assert ours.fingerprint == built.fingerprint


def test_the_start_of_a_text_is_that_of_the_family(tmp_path) -> None:
    """OPT's texts start with </s>, GPT-2's with nothing."""
    assert build_tokenizer("hf", path=made(tmp_path, opt)).prompt_prefix == [2]
    assert build_tokenizer("hf", path=made(tmp_path, gpt2)).prompt_prefix == []


class Pieces(NamedTuple):
    """A SentencePiece model of a family: options of its training and the name of its file."""

    name: str
    kind: str
    training: dict[str, Any]


T5 = Pieces("spiece.model", "T5Tokenizer", {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1})
LLAMA = Pieces(
    "tokenizer.model",
    "LlamaTokenizer",
    {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "split_digits": True,
        "allow_whitespace_only_pieces": True,
    },
)


def sentence_pieces(folder: Path, family: Pieces, **config: Any) -> Path:
    folder.mkdir()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(HARD[:7] * 5),
        model_writer=(model := open(folder / family.name, "wb")),  # noqa: SIM115
        vocab_size=420 if family is LLAMA else 120,
        character_coverage=0.99,
        hard_vocab_limit=False,
        minloglevel=2,
        **family.training,
    )
    model.close()
    kind = "t5" if family is T5 else "llama"
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": family.kind, **config}))
    return folder


MODELS = {
    "t5": (T5, {"extra_ids": 100}),
    "mt5": (T5, {"extra_ids": 0}),
    "llama": (LLAMA, {"legacy": False, "add_bos_token": True}),
    "llama_1": (LLAMA, {"legacy": True, "add_bos_token": True}),
}


@pytest.mark.parametrize("name", MODELS)
def test_sentence_pieces_are_the_librarys_with_what_the_class_adds(name, tmp_path) -> None:
    family, config = MODELS[name]
    folder = sentence_pieces(tmp_path / name, family, **config)
    library = sentencepiece.SentencePieceProcessor(model_file=str(folder / family.name))
    built = build_tokenizer("hf", path=folder)
    built.save(tmp_path / "saved")
    size = library.get_piece_size()
    for ours in (built, load_tokenizer(tmp_path / "saved"), pickle.loads(pickle.dumps(built))):
        for text, batched in zip(TEXTS, ours.encode_batch(TEXTS), strict=True):
            assert ours.encode(text) == batched == library.encode(text)
            if library.unk_id() not in batched:  # which the library spells as a sign of its own
                assert ours.decode(batched) == library.decode(batched)
        assert ours.vocab_size == size + config.get("extra_ids", 0)
        if name == "t5":
            assert ours.encode("a<extra_id_0>b <extra_id_99>", command_tokens=True) == [
                *library.encode("a"), size + 99, *library.encode("b "), size,
            ]  # fmt: skip
            assert (ours.special.pad, ours.special.eos, ours.special.bos) == (0, 1, None)
        if family is LLAMA:
            assert list(ours.prompt_prefix) == [1]
            # Behind a special token the older class puts a space in front of the text, the newer one does not.
            prefixed, behind = library.encode("the sea"), ours.encode("</s>the sea", command_tokens=True)[1:]
            assert (behind == prefixed) == config["legacy"]
            assert ours.decode(behind).lstrip() == "the sea"


@pytest.mark.parametrize("name", MODELS)
def test_sentence_pieces_are_those_of_auto_tokenizer(name, tmp_path) -> None:
    pytest.importorskip("google.protobuf", reason="transformers reads the model with protobuf (pip install ftk[test])")
    family, config = MODELS[name]
    folder = sentence_pieces(tmp_path / name, family, **config)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), build_tokenizer("hf", path=folder)
    for text in TEXTS:
        # Where a text spells </s> or a sentinel, the `tokenizers` library makes the token; the library of T5 does not.
        # Of LLaMA's, today's class leaves out the space that the library, and older classes, put in front of a space.
        if not text.startswith(" ") if family is LLAMA else ">" not in text:
            ids = their_ids(theirs, text, add_special_tokens=False, split_special_tokens=True)
            assert ours.encode(text) == ids
    assert ours.vocab_size == len(theirs)
    # Where a space follows a special token already, the older class put another one in front; today's does not.
    for prompt in ("the sea</s>the sea", "a </s>b</s>" if config.get("legacy") else "a </s> b</s>"):
        ids = their_ids(theirs, prompt, add_special_tokens=False)
        assert ours.encode(prompt, command_tokens=True) == ids


def test_added_tokens_and_the_chat_template_are_kept(tmp_path) -> None:
    """Tokens behind the pieces are found in texts; the template decides no ids."""
    folder = sentence_pieces(tmp_path / "llama", *MODELS["llama"][:1], legacy=True)
    plain = build_tokenizer("hf", path=folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    templated = build_tokenizer("hf", path=folder)
    assert templated.chat_template == "{{ messages }}"
    assert templated.fingerprint == plain.fingerprint
    (folder / "added_tokens.json").write_text(json.dumps({"quokka": plain.vocab_size}))
    found = build_tokenizer("hf", path=folder)
    found.save(tmp_path / "saved")
    assert load_tokenizer(tmp_path / "saved").chat_template == "{{ messages }}"
    assert found.encode("a quokka")[-1] == plain.vocab_size
    assert found.encode_batch(["a b", "a quokka"]) == [found.encode("a b"), found.encode("a quokka")]
    assert found.decode(found.encode("a quokka")) == "a quokka"
    assert found.vocab_size == plain.vocab_size + 1


@pytest.mark.parametrize("listed", [False, True], ids=["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_sentence_pieces_learn_tokens_in_the_files_of_transformers(name, listed, tmp_path) -> None:
    family, config = MODELS[name]
    decoder = {"added_tokens_decoder": {}} if listed else {}
    old = build_tokenizer("hf", path=sentence_pieces(tmp_path / "old", family, **config, **decoder))
    grown = grow_tokenizer(old, ["quokka", "sea shore"], tmp_path / "new")
    assert (tmp_path / "new" / "added_tokens.json").exists() != listed
    found = load_tokenizer(tmp_path / "new")
    assert grown.new == {"quokka": old.vocab_size, "sea shore": old.vocab_size + 1}
    assert found.special == old.special
    assert found.encode("by the sea shore a quokka")[-1] == old.vocab_size
    assert all(found.encode(text) == old.encode(text) for text in HARD if "sea shore" not in text)
    again = grow_tokenizer(found, ["yak"], tmp_path / "again").tokenizer
    assert again.encode("quokka yak")[-1] == old.vocab_size + 2
    assert again.encode("quokka")[-1] == old.vocab_size


def test_preprocess_and_its_workers_read_such_a_folder(tmp_path, capsys) -> None:
    folder = made(tmp_path, bert_uncased)
    (tmp_path / "text").write_text("\n".join(text.replace("\n", " ") for text in HARD) + "\n")
    out = f"--trainpref {tmp_path}/text --destdir {tmp_path}/data"
    assert preprocess(f"{out} --tokenizer hf --tokenizer-path {folder}".split()) == 0
    assert "lossless" not in capsys.readouterr().err
    assert load_tokenizer(tmp_path / "data").fingerprint == build_tokenizer("hf", path=folder).fingerprint


def of_another_class(folder: Path) -> None:
    word_pieces(folder, tokenizer_class="BertJapaneseTokenizer")


def without_merges(folder: Path) -> None:
    gpt2(folder)
    (folder / "merges.txt").unlink()


def with_wrong_ids(folder: Path) -> None:
    gpt2(folder)
    (folder / "added_tokens.json").write_text('{"<|extra_1|>": 500}')


def with_a_far_id(folder: Path) -> None:
    shutil.rmtree(folder)
    sentence_pieces(folder, LLAMA)
    (folder / "added_tokens.json").write_text('{"quokka": 999999999}')


def with_a_far_id_in_its_configuration(folder: Path) -> None:
    shutil.rmtree(folder)
    sentence_pieces(folder, LLAMA, added_tokens_decoder={"999999999": {"content": "quokka"}})


def unknown_pieces(folder: Path) -> None:
    """As XLM-RoBERTa's, whose class shifts the ids by one."""
    shutil.rmtree(folder)
    sentence_pieces(folder, LLAMA)
    (folder / "tokenizer.model").rename(folder / "sentencepiece.bpe.model")
    (folder / "tokenizer_config.json").unlink()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (of_another_class, "names 'BertJapaneseTokenizer', which may give other ids"),
        (without_merges, r"merges\.txt: no such file"),
        (with_wrong_ids, r"'<\|extra_1\|>' to the id 500, but here it would get"),
        (with_a_far_id, "'quokka' to the id 999999999; ids are below 10000000"),
        (with_a_far_id_in_its_configuration, "'quokka' to the id 999999999; ids are below 10000000"),
        (gpt2_without_its_token, r"is to have '<\|endoftext\|>' around it, which is not in the vocabulary"),
        (unknown_pieces, "names no 'tokenizer_class', and the model is numbered as neither"),
        (lambda folder: None, "holds no tokenizer: no tokenizer.json, vocab.txt"),
    ],
)
def test_mistakes_name_the_file(write, message, tmp_path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder)
    with pytest.raises(UserError, match=message):
        build_tokenizer("hf", path=folder)


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_a_vocabulary_of_words_that_jieba_cuts_is_refused(file, tmp_path) -> None:
    """CPM-1's folder; as a model it is opened, and read by token ids."""
    Tokenizer(Unigram([("<unk>", 0.0), ("a", -1.0)], 0)).save(f"{tmp_path}/tokenizer.json")
    (tmp_path / file).write_text(json.dumps({"tokenizer_class": "CpmTokenizer"}))
    with pytest.raises(UserError, match="tokenizer.json: is of CpmTokenizer, which first cuts texts into words with"):
        build_tokenizer("hf", path=tmp_path)
    assert why_unreadable(tmp_path) is not None


def test_a_model_that_ftk_trained_is_no_such_folder(tmp_path) -> None:
    """The message says what reads it."""
    train_sentencepiece(HARD * 3, tmp_path, vocab_size=345)
    with pytest.raises(UserError, match="`tokenizer` sentencepiece reads it"):
        build_tokenizer("hf", path=tmp_path)
