"""Task files with odd rows are read as JSONL by every command that reads JSONL: a clear message, or good data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from preprocessing import run as preprocess

from ftk.data import IndexedDataset
from ftk.data.corpora.raw_corpus import RawCorpus, RawCorpusConfig
from ftk.data.inspect_data import verify
from ftk.errors import UserError
from ftk.tokenizers import build_tokenizer, load_tokenizer

COPA, WIC, MULTIRC = "70_copa_bad.jsonl", "71_wic_bad_offsets.jsonl", "73_multirc_empty.jsonl"
# file, field -> start of the message without --on-error skip, or None; texts and skipped by reason with it.
CASES: dict[tuple[str, str], tuple[str | None, list[str], dict[str, int]]] = {
    (COPA, "text"): (':1: (byte 0) no field "text" (fields: "premise", "choice1"', [], {"missing_key": 6}),
    (COPA, "premise"): (None, ["p"] * 6, {}),
    (COPA, "choice1"): (':4: (byte 264) field "choice1" is null, not a string', ["a"] * 5, {"wrong_type": 1}),
    (COPA, "question"): (None, ["cause", "cause", "cause", "effect", "why", "effect"], {}),
    (COPA, "label"): (
        ':1: (byte 0) field "label" is a number, not a string',
        ["1"],
        {"wrong_type": 4, "missing_key": 1},
    ),
    (WIC, "sentence2"): (None, ["Real class."] * 3, {}),
    (WIC, "start1"): (':1: (byte 0) field "start1" is a number, not a string', [], {"wrong_type": 3}),
    (WIC, "label"): (':1: (byte 0) field "label" is a boolean, not a string', [], {"wrong_type": 3}),
    (MULTIRC, "text"): (':1: (byte 0) no field "text" (fields: "idx", "passage")', [], {"missing_key": 3}),
    (MULTIRC, "passage"): (':1: (byte 0) field "passage" is an object, not a string', [], {"wrong_type": 3}),
}
each_case = pytest.mark.parametrize(("name", "key"), CASES)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory, letters_model) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer("sentencepiece", path=letters_model).save(folder)
    return folder


@pytest.fixture
def source(test_data, name) -> Path:
    path = test_data / "hostile" / name
    if not path.exists():
        pytest.skip(f"{path} is missing")
    return path


def texts_of(documents, tokenizer_folder) -> list[str]:
    tokenizer = load_tokenizer(tokenizer_folder)
    return [tokenizer.decode(documents[number].tolist()) for number in range(len(documents))]


@each_case
def test_ftk_preprocess(source, tmp_path, capsys, tokenizer_folder, name, key):
    refusal, texts, skipped = CASES[name, key]

    def run(out: Path, *more: object) -> tuple[int, str]:
        given = ["--trainpref", source, "--destdir", out, "--text-key", key, "--tokenizer-path", tokenizer_folder]
        code = preprocess(*given, "--workers", 1, *more)
        return code, capsys.readouterr().err

    code, shown = run(tmp_path / "strict")
    assert code == (0 if refusal is None else 2)
    assert "Traceback" not in shown
    if refusal is not None:
        assert shown.splitlines()[-1].startswith(f"ftk-preprocess: {source}{refusal}")
        assert list(tmp_path.iterdir()) == []
    code, shown = run(tmp_path / "lenient", "--on-error", "skip")
    assert code == (0 if texts else 2)
    assert "Traceback" not in shown
    if not texts:
        counts = ", ".join(f"{count} {reason}" for reason, count in skipped.items())
        assert f"{source}: no documents for train (skipped: {counts})" in shown
        return
    assert verify(tmp_path / "lenient") == []
    assert texts_of(IndexedDataset(tmp_path / "lenient" / "train"), tokenizer_folder) == texts
    record = json.loads((tmp_path / "lenient" / "preprocess.json").read_text())["splits"]["train"]
    assert record["skipped"] == skipped


@each_case
def test_the_dataset_raw(source, tokenizer_folder, name, key):
    refusal, texts, _ = CASES[name, key]

    def read(on_error: str) -> list[str]:
        config = RawCorpusConfig(
            data=f"train={source}", tokenizer_folder=str(tokenizer_folder), text_key=key, on_error=on_error
        )
        return texts_of(RawCorpus(config).documents("train"), tokenizer_folder)

    if refusal is None:
        assert read("raise") == texts
    else:
        with pytest.raises(UserError) as caught:
            read("raise")
        assert str(caught.value).startswith(f"{source}{refusal}")
    if texts:
        assert read("skip") == texts
    else:
        with pytest.raises(UserError, match="no documents for train"):
            read("skip")
