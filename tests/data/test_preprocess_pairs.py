"""Pairs of texts, from two files or from JSON lines, become documents of two texts and their end tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import preprocessing
import pytest
from preprocessing import sentences

from ftk.data import IndexedDataset
from ftk.data.inspect_data import verify
from ftk.data.text import preprocess
from ftk.tasks.translation.task import TranslationTask
from ftk.tokenizers import load_tokenizer

PAIRS = list(zip(sentences(1500, 1), sentences(1500, 2, (1, 6), " ?"), strict=True))


def run(out: Path, model: Path | None, *arguments: object) -> int:
    path = ["--tokenizer-path", model] if model else ["--vocab-size", 290]
    languages = ["--source-lang", "en", "--target-lang", "de"]
    return preprocessing.run("--destdir", out, *path, *languages, *arguments)


def documents(out: Path, split: str = "train") -> list[list[int]]:
    return [row.tolist() for row in IndexedDataset(out / split)]


def expected(out: Path, pairs: list[tuple[str, str]]) -> list[list[int]]:
    tokenizer = load_tokenizer(out)
    end = tokenizer.special.eos
    return [[*tokenizer.encode(source), end, *tokenizer.encode(target), end] for source, target in pairs]


def word_level(pieces: list[str]) -> dict:
    """A tokenizer.json of words that spaces part."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "[UNK]"}
    others = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model, **others}


def skipped(out: Path) -> dict[str, int]:
    return json.loads((out / "preprocess.json").read_text(encoding="utf-8"))["splits"]["train"]["skipped"]


def write(folder: Path, pairs: list[tuple[str, str]], name: str = "text") -> Path:
    for number, language in enumerate(("en", "de")):
        lines = "".join(f"{pair[number]}\n" for pair in pairs)
        (folder / f"{name}.{language}").write_text(lines, encoding="utf-8")
    return folder / name


@pytest.mark.parametrize("workers", [1, 2])
def test_lines_of_two_files_are_pairs(tmp_path, model, workers) -> None:
    prefix = write(tmp_path, [*PAIRS, ("only one", " "), ("", "side")])
    (tmp_path / "text.de.gz").write_bytes(gzip.compress((tmp_path / "text.de").read_bytes()))
    (tmp_path / "text.de").unlink()
    out = tmp_path / "out"
    assert run(out, model, "--trainpref", prefix, "--validpref", prefix, "--workers", workers) == 0
    assert documents(out) == documents(out, "valid") == expected(out, PAIRS)
    assert load_tokenizer(out).special_tokens.name == "with_end"
    assert skipped(out) == {"empty": 2}
    assert verify(out) == []


def test_json_lines_have_both_texts(tmp_path, model) -> None:
    path = tmp_path / "text.jsonl"
    pairs = [("one\ntwo", "drei"), *PAIRS[:20]]
    path.write_text("".join(json.dumps({"en": en, "id": 1, "de": de}) + "\n" for en, de in pairs), encoding="utf-8")
    out = tmp_path / "out"
    assert run(out, model, "--trainpref", path, "--workers", 1) == 0
    assert documents(out) == expected(out, pairs)
    path.write_text('{"en": "a", "de": "b"}\n{"en": "a"}\n', encoding="utf-8")
    assert run(tmp_path / "bad", model, "--trainpref", path, "--workers", 1) == 2


def test_a_model_is_trained_on_both_sides_and_repeats_are_those_of_pairs(tmp_path) -> None:
    pairs = [*PAIRS[:300], *PAIRS[:50], (PAIRS[0][0], PAIRS[1][1])]
    out = tmp_path / "out"
    assert run(out, None, "--trainpref", write(tmp_path, pairs), "--dedup", "--workers", 1) == 0
    assert documents(out) == expected(out, [*PAIRS[:300], pairs[-1]])
    tokenizer = load_tokenizer(out)
    assert any("?" in tokenizer.token_text(token) for token in range(tokenizer.vocab_size))


def test_a_model_is_trained_for_each_side(tmp_path, monkeypatch) -> None:
    """In this process: a new Python for each takes seconds."""
    monkeypatch.setattr(preprocess, "call_in_child", lambda function, *arguments: function(*arguments))
    out = tmp_path / "out"
    given = ["--trainpref", write(tmp_path, PAIRS[:300]), "--source-vocab-size", 285, "--workers", 1]
    assert run(out, None, *given) == 0
    tokenizer = load_tokenizer(out)
    marks = {".": tokenizer.source, "?": tokenizer}  # of the ends of sources and targets
    for mark, one in marks.items():
        pieces = [one.token_text(token) for token in range(one.vocab_size)]
        assert [other for other in marks if any(other in piece for piece in pieces)] == [mark]
    ends = tokenizer.source.special.eos, tokenizer.special.eos
    first = [*tokenizer.source.encode(PAIRS[0][0]), ends[0], *tokenizer.encode(PAIRS[0][1]), ends[1]]
    assert documents(out)[0] == first
    assert verify(out) == []


WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "one", "two", "three"]


@pytest.fixture
def chinese_bart(tmp_path) -> Path:
    """A folder with BERT's tokenizer, which has no token of the role eos."""
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in WORD_PIECES), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}', encoding="utf-8")
    return folder


def test_texts_end_in_sep_where_the_tokenizer_has_no_other_end(tmp_path, chinese_bart) -> None:
    out = tmp_path / "out"
    prefix = write(tmp_path, [("one two", "three")])
    assert run(out, chinese_bart, "--tokenizer", "hf", "--trainpref", prefix, "--workers", 1) == 0
    assert documents(out) == [[5, 6, 3, 7, 3]]
    framing = TranslationTask.framing(load_tokenizer(out), SimpleNamespace(decoder_start_token=3))
    assert (framing.ends, framing.source([5, 6])) == ((3,), [2, 5, 6, 3])


def test_a_tokenizer_without_an_end_is_refused_by_the_option_that_asks_for_it(tmp_path, chinese_bart, capfd) -> None:
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (chinese_bart / "vocab.txt").unlink()
    (chinese_bart / "tokenizer.json").write_text(
        json.dumps(word_level(["[UNK]", "one", "two", "three"])), encoding="utf-8"
    )
    (chinese_bart / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    given = ["--tokenizer", "hf", "--trainpref", write(tmp_path, [("one two", "three")]), "--workers", 1]
    assert run(tmp_path / "out", chinese_bart, *given) == 2
    assert "--source-lang: the tokenizer hf has no end token for the texts of pairs; name" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({"is_encoder_decoder": True, "decoder_start_token_id": 3}, "--finetune-from {} --task translation --max"),
        (
            {"is_encoder_decoder": True, "decoder_start_token_id": 0},
            "--finetune-from {} --task translation --decoder-start pad --max",
        ),
        ({}, "--arch t5_tiny --task translation --max"),
    ],
)
def test_the_encoder_decoder_beside_the_tokenizer_is_proposed(tmp_path, chinese_bart, capsys, config, flags) -> None:
    (chinese_bart / "config.json").write_text(json.dumps(config))
    (chinese_bart / "model.safetensors").touch()
    prefix = write(tmp_path, [("one two", "three")])
    assert run(tmp_path / "out", chinese_bart, "--tokenizer", "hf", "--trainpref", prefix, "--workers", 1) == 0
    assert flags.format(chinese_bart) in capsys.readouterr().out


@pytest.mark.parametrize("policy", ["raise", "skip"])
def test_lines_that_cannot_be_read_take_their_translation_with_them(tmp_path, model, capfd, policy) -> None:
    prefix = write(tmp_path, PAIRS[:10])
    lines = (tmp_path / "text.de").read_bytes().splitlines()
    lines[3] = b"\xff"
    lines[7] = b"a\0b"
    (tmp_path / "text.de").write_bytes(b"\n".join(lines))
    out = tmp_path / "out"
    code = run(out, model, "--trainpref", prefix, "--on-error", policy, "--workers", 1)
    if policy == "raise":
        assert code == 2
        assert f"{prefix}.de:4: (byte" in capfd.readouterr().err
        return
    assert documents(out) == expected(out, [pair for number, pair in enumerate(PAIRS[:10]) if number not in (3, 7)])
    assert skipped(out) == {"invalid_utf8": 1, "nul": 1}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainpref", "{}/text"], "text.en has 5 lines, {}/text.de 3 lines"),
        (["--trainpref", "{}/text.en"], "text.en: pairs are JSON lines, or lines of two files"),
        (["--trainpref", "{}/none"], "none.en: no such file; pairs are lines of two files"),
        (["--trainpref", "{}/text", "--target-lang", "en"], "source_lang and target_lang are both en"),
    ],
)
def test_what_is_wrong_with_the_files_is_said(tmp_path, model, capfd, arguments, message) -> None:
    prefix = write(tmp_path, PAIRS[:5])
    lines = (tmp_path / "text.de").read_text().splitlines(keepends=True)
    (tmp_path / "text.de").write_text("".join(lines[:3]))
    given = [argument.format(tmp_path) for argument in arguments]
    assert run(tmp_path / "out", model, *given, "--workers", 1) == 2
    said = capfd.readouterr().err.replace("--source-lang", "source_lang").replace("--target-lang", "target_lang")
    assert message.format(tmp_path) in said
    assert prefix.with_suffix(".en").exists()
