"""A grown checkpoint: new tokens and positions are there, and old answers are what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

import ftk
from ftk.checkpoint import load_model_tensors, read_config
from ftk.checkpoint.convert import convert_to
from ftk.checkpoint.grow import grow_checkpoint
from ftk.checkpoint.huggingface import HuggingFace, HuggingFaceConfig
from ftk.checkpoint.transfer import transfer_weights
from ftk.errors import UserError
from ftk.models import build_model, model_config
from ftk.tokenizers import build_tokenizer, load_tokenizer
from ftk.tokenizers.added_tokens import read_added_tokens
from ftk_cli.checkpoint import main
from ftk_cli.preprocess import main as preprocess
from ftk_cli.train import main as train
from tests.small_run import LINES, WORDS, save_model

NEW = ["zebrafish", "foxtrot dance"]
SHAPE = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "max_positions": 24}
FAMILIES = {
    "bert": {"next_sentence": True},
    "cpm1": {"head_dim": 8},
    "cpmant": {"head_dim": 8, "prompt_length": 4, "prompt_types": 3},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gptj": {"rotary_dim": 8},
    "llama": {"num_kv_heads": 2},
    "llama tied, yarn": {"tie_embeddings": True, "rope_scaling": "yarn", "rope_factor": 2.0},
    "opt": {"word_embedding_size": 20},
    "roberta": {"pad_token": 1},
    "t5": {},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Text, and a tokenizer of ftk's with letters for words it does not know."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "text").write_text("\n".join(LINES) + "\n")
    source = f"--trainpref {folder}/text --validpref {folder}/text --destdir {folder}/data --vocab-size 290"
    assert preprocess([*source.split()]) == 0
    return folder


def make(folder: Path, name: str, tokenizer: Path | None, rows: int, **changes: Any) -> Path:
    """A checkpoint with random weights, also where they start as zeros."""
    shape = {**SHAPE, **FAMILIES[name], **changes, "vocab_size": rows}
    family = name.split()[0]
    torch.manual_seed(3)
    known = set(model_config(family)[1].__dataclass_fields__)
    shape = {key: value for key, value in shape.items() if key in known}
    model = build_model(family, **shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape))
    return save_model(folder, model, tokenizer)


def inputs(model: Any, length: int, rows: int) -> dict[str, torch.Tensor]:
    def tokens() -> torch.Tensor:
        return torch.randint(5, rows, (2, length), generator=torch.Generator().manual_seed(3))

    given = {"tokens": tokens()}
    if "decoder_tokens" in model.INPUTS:
        given["decoder_tokens"] = tokens()
    return given


def logits(folder: Path, length: int, rows: int) -> torch.Tensor:
    model = ftk.load_model(folder)
    with torch.no_grad():
        return model(**inputs(model, length, rows))


@pytest.mark.parametrize("name", FAMILIES)
def test_old_answers_stay_and_new_rows_are_means(place, tmp_path, name) -> None:
    tokenizer = load_tokenizer(place / "data")
    old_size = tokenizer.vocab_size
    before = make(tmp_path / "before", name, place / "data" / "tokenizer", old_size + 1)  # a row of padding
    grown = grow_checkpoint(before, tmp_path / "after", tokens=[*NEW, NEW[0]], max_positions=60)
    assert (grown.tokens.new, grown.tokens.known) == ({NEW[0]: old_size, NEW[1]: old_size + 1}, [NEW[0]])
    rows = load_tokenizer(tmp_path / "after").vocab_size
    assert rows == old_size + 2
    config = read_config(tmp_path / "after")["model"]
    assert config["vocab_size"] >= rows
    old, new = logits(before, 20, old_size), logits(tmp_path / "after", 20, old_size)
    torch.testing.assert_close(new[..., :old_size], old[..., :old_size], rtol=1e-5, atol=1e-5)
    # Texts beyond the old limit are answered, by any family.
    assert logits(tmp_path / "after", 50, rows).isfinite().all()
    tensors, others = load_model_tensors(tmp_path / "before"), load_model_tensors(tmp_path / "after")
    pieces = [tokenizer.encode(text) for text in NEW]
    checked = 0
    for key, tensor in tensors.items():
        now = others[key]
        if name == "cpmant" and key == "token_embedding.weight":  # 12 rows of prompts behind the vocabulary
            assert torch.equal(now[config["vocab_size"] :], tensor[-12:])
            tensor = tensor[:-12]
        if tensor.shape[:1] == (old_size + 1,):
            checked += 1
            assert torch.equal(now[:old_size], tensor[:old_size])
            for number, ids in enumerate(pieces):
                torch.testing.assert_close(now[old_size + number], tensor[ids].mean(dim=0))
        elif key not in grown.tables:
            assert torch.equal(now, tensor)
    assert checked == {"bert": 2, "roberta": 2, "gptj": 3}.get(name, 2 if "head.weight" in tensors else 1)


def test_rows_of_all_tokens_and_not_of_padding(place, tmp_path) -> None:
    """With the mean of all rows; the number of rows becomes a multiple."""
    old_size = load_tokenizer(place / "data").vocab_size
    before = make(tmp_path / "before", "gpt2", place / "data" / "tokenizer", old_size + 1)
    grow_checkpoint(before, tmp_path / "after", tokens=NEW, new_rows="mean", divisor=64)
    old, new = (load_model_tensors(folder)["token_embedding.weight"] for folder in (before, tmp_path / "after"))
    assert len(new) % 64 == 0
    for row in new[old_size : old_size + 2]:
        torch.testing.assert_close(row, old[:old_size].mean(dim=0))


TABLES = {"bert": 1, "glm": 2, "gpt2": 1, "opt": 1, "roberta": 1, "llama": 0}


@pytest.mark.parametrize("how", ["repeat", "interpolate"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_of_positions_are_copied_or_stretched(place, tmp_path, name, how) -> None:
    rows = load_tokenizer(place / "data").vocab_size
    before = make(tmp_path / "before", name, place / "data" / "tokenizer", rows)
    grown = grow_checkpoint(before, tmp_path / "after", max_positions=60, new_positions=how)
    assert len(grown.tables) == TABLES[name]
    for table in grown.tables:
        old, new = (load_model_tensors(folder)[table] for folder in (before, tmp_path / "after"))
        first = 1 if table.endswith("block.weight") else {"opt": 2, "roberta": 2}.get(name, 0)
        others = len(old) - first - 24  # rows at the end that are no positions
        assert len(new) == len(old) + 36
        assert torch.equal(new[:first], old[:first])
        assert torch.equal(new[len(new) - others :], old[len(old) - others :])
        if how == "repeat" or table.endswith("block.weight"):  # a new position in a blank is never that of the context
            for position in range(60):
                assert torch.equal(new[first + position], old[first + position % 24])
        else:
            torch.testing.assert_close(new[first], old[first])
            torch.testing.assert_close(new[first + 59], old[first + 23])
            torch.testing.assert_close(new[first + 1], 36 / 59 * old[first] + 23 / 59 * old[first + 1])


def byte_level(folder: Path) -> Path:
    """A folder of Hugging Face with tokenizer.json."""
    folder.mkdir()
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(LINES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    made.save(str(folder / "tokenizer.json"))
    return folder


def old_bert(folder: Path) -> Path:
    folder.mkdir()
    made = tokenizers.BertWordPieceTokenizer()
    made.train_from_iterator(LINES, vocab_size=200, show_progress=False)
    made.save_model(str(folder))
    return folder


def test_a_hugging_face_folder_grows_and_goes_back_to_transformers(place, tmp_path, capsys) -> None:
    """Through the commands: growing, preprocessing, training, conversion; data of the old tokenizer are refused."""
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")
    hf = build_tokenizer("hf", path=byte_level(tmp_path / "vocabulary"))
    hf.save(tmp_path / "saved")
    made = make(tmp_path / "made", "llama", tmp_path / "saved", hf.vocab_size)
    theirs = convert_to(HuggingFace(HuggingFaceConfig()), "hf", made, tmp_path / "theirs")
    (tmp_path / "new").write_text(" zebrafish\nfoxtrot\nq\n")
    after = tmp_path / "after"
    command = ["grow", str(theirs), str(after), "--add-tokens", str(tmp_path / "new")]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    size = hf.vocab_size
    assert lines[0] == f"2 new tokens, ids {size} to {size + 1}; one token already: 'q'"
    assert lines[1] == f"vocabulary: {size + 2} rows, before {size}"
    assert f"ftk-preprocess --tokenizer hf --tokenizer-path {after}/tokenizer ..." in lines[-1]
    assert main(command) == 2
    (tmp_path / "text").write_text("a zebrafish is no foxtrot\n" * 20)
    for name, folder in (("new", after / "tokenizer"), ("old", theirs)):
        source = (
            f"--trainpref {tmp_path}/text --destdir {tmp_path}/{name}-data --tokenizer hf --tokenizer-path {folder}"
        )
        assert preprocess(source.split()) == 0
    options = f"--finetune-from {after} --seq-length 16 --batch-size 2 --max-update 2 --valid-subset none --lr 1e-4"
    capsys.readouterr()
    assert train([f"{tmp_path}/old-data", *options.split(), "--save-dir", f"{tmp_path}/refused"]) == 2
    assert "was trained with another tokenizer than the data's" in capsys.readouterr().err
    assert train([f"{tmp_path}/new-data", *options.split(), "--save-dir", f"{tmp_path}/run"]) == 0
    assert main(["convert", "--to", "hf", f"{tmp_path}/run", f"{tmp_path}/back"]) == 0
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    text = "a zebrafish, foxtrot the quick"
    assert back(text)["input_ids"] == load_tokenizer(after).encode(text)
    assert {size, size + 1} < set(back(text)["input_ids"])
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert model.get_input_embeddings().num_embeddings == size + 2


@pytest.mark.parametrize("kind", ["bert_wordpiece", "gpt2_bpe", "hf", "sentencepiece", "sentencepiece glm"])
def test_any_tokenizer_learns_tokens_and_keeps_its_other_ids(place, tmp_path, kind) -> None:
    if kind.startswith("sentencepiece"):
        layout = {"special_tokens": "glm"} if "glm" in kind else {}
        old = build_tokenizer("sentencepiece", path=place / "data" / "tokenizer", **layout)
    elif kind == "gpt2_bpe":
        made = tokenizers.ByteLevelBPETokenizer()
        made.train_from_iterator(LINES, vocab_size=300, show_progress=False)
        made.save_model(str(tmp_path))
        old = build_tokenizer(kind, path=tmp_path, special_tokens="with_end")
    else:
        old = build_tokenizer(kind, path=old_bert(tmp_path / "bert"))
    old.save(tmp_path / "old")
    before = make(tmp_path / "before", "gpt2", tmp_path / "old", old.vocab_size)
    grown = grow_checkpoint(before, tmp_path / "after", tokens=[*NEW, "naïve"])
    found = load_tokenizer(tmp_path / "after")
    assert found.fingerprint == grown.tokens.tokenizer.fingerprint != old.fingerprint
    assert found.special == old.special
    texts = ["the quick brown", *WORDS, "a zebrafish", "foxtrot dance the fox", "ZEBRAFISH"]
    for text in texts[:-3]:
        assert found.encode(text) == old.encode(text)
    assert found.encode_batch(texts) == [found.encode(text) for text in texts]
    first = old.vocab_size
    assert found.encode("the zebrafish")[-1] == first
    assert found.encode("the foxtrot dance")[-1] == first + 1
    assert (found.encode("ZEBRAFISH") == [first]) == (kind in ("bert_wordpiece", "hf"))
    # Letters that are no capitals of those of the token.
    odd = ["zebrafi\N{LATIN SMALL LETTER LONG S}h", "zebraf\N{LATIN CAPITAL LETTER I WITH DOT ABOVE}sh"]
    known = {"bert_wordpiece": [True, True], "hf": [False, True]}.get(kind, [False, False])
    assert [found.encode(text) == [first] for text in odd] == known
    assert found.decode([first]).strip() == "zebrafish"
    assert found.decode([first + 2]).strip() in ("naïve", "naive" if kind == "hf" else "")  # which drops accents
    # Grown once more.
    again = grow_checkpoint(tmp_path / "after", tmp_path / "again", tokens=["yak-hair"])
    assert again.tokens.new == {"yak-hair": first + 3}
    last = load_tokenizer(tmp_path / "again")
    assert last.encode("the zebrafish")[-1] == first
    assert last.encode("yak-hair")[-1] == first + 3


def test_rows_behind_the_vocabulary_are_not_mixed_up_by_fine_tuning(tmp_path) -> None:
    """Of a model with another vocabulary, where CPM-Ant has rows of its prompts."""
    before = make(tmp_path / "before", "cpmant", None, 40)
    model = build_model("cpmant", **SHAPE, **FAMILIES["cpmant"], vocab_size=50)
    weights = model.token_embedding.weight.clone()
    with pytest.raises(UserError, match=r"\(a vocabulary of another size: ftk-checkpoint grow\)"):  # no word of common
        transfer_weights(before, model)
    with pytest.raises(UserError, match=r"a model of cpmant has other rows after those of the vocabulary"):
        transfer_weights(before, model, common_rows=True)
    assert torch.equal(model.token_embedding.weight, weights)


@pytest.mark.parametrize("id_", [-1, 999999999])
def test_an_added_token_with_an_impossible_id_is_refused(tmp_path, id_) -> None:
    (tmp_path / "ftk_added_tokens.json").write_text(f'{{"quokka": {id_}}}')
    with pytest.raises(UserError, match="must hold tokens and their ids, each id once and below 10000000"):
        read_added_tokens(tmp_path / "vocab.txt")


def test_mistakes_are_named(tmp_path, capsys) -> None:
    build_tokenizer("hf", path=byte_level(tmp_path / "vocabulary")).save(tmp_path / "saved")
    rows = load_tokenizer(tmp_path / "saved").vocab_size
    before = make(tmp_path / "before", "gpt2", tmp_path / "saved", rows)
    (tmp_path / "known").write_text("q\n")
    (tmp_path / "empty line").write_text("zebra\n\nfish\n")
    without = make(tmp_path / "without", "gpt2", None, rows)
    for arguments, message in {
        (): "nothing grows; give --add-tokens, --max-positions or both",
        ("--add-tokens", f"{tmp_path}/known"): "has 1 such token already, and learns no other",
        ("--add-tokens", f"{tmp_path}/empty line"): "empty line:2: the line is empty",
        ("--add-tokens", f"{tmp_path}/none"): "none: no such file",
        ("--max-positions", "24"): "has 24 positions; --max-positions 24 must be more",
    }.items():
        assert main(["grow", str(before), str(tmp_path / "after"), *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "after").exists()
    with pytest.raises(UserError, match="has no tokenizer that could learn tokens"):
        grow_checkpoint(without, tmp_path / "after", tokens=["zebra"])
