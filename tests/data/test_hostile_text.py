"""Every bad and odd text and JSONL file goes through ftk-preprocess: a clear message, or good data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from preprocessing import run

from ftk.data import IndexedDataset
from ftk.data.inspect_data import verify
from ftk.tokenizers import load_tokenizer

# file -> (start of the message without --on-error skip, or None; documents; skipped by reason) with it.
NO = "no documents for train"
CASES: dict[str, tuple[str | None, int, dict[str, int]]] = {
    "01_empty.txt": (f": {NO} (skipped: none; there is no text)", 0, {}),
    "02_only_newlines.txt": (f": {NO} (skipped: 1000 empty)", 0, {}),
    "03_only_blank.txt": (f": {NO} (skipped: 5 empty)", 0, {}),
    "04_crlf.txt": (None, 3, {"empty": 1}),
    "05_cr_only.txt": (None, 1, {}),
    "06_mixed_eol.txt": (None, 4, {}),
    "07_no_final_newline.txt": (None, 3, {}),
    "08_nul_bytes.txt": (":1: (byte 6) a NUL byte", 1, {"nul": 3}),
    "09_bom_utf8.txt": (None, 2, {}),
    "10_bom_inside.txt": (None, 3, {}),
    "11_utf16le_bom.txt": (":1: (byte 0) the file starts with FF FE: UTF-16", 0, {}),
    "12_utf16be_nobom.txt": (":1: (byte 0) a NUL byte, which is not text (UTF-16", 0, {}),
    "13_invalid_utf8.txt": (":2: (byte 32) invalid UTF-8 (0x80", 2, {"invalid_utf8": 7}),
    "15_latin1.txt": (":1: (byte 3) invalid UTF-8 (0xE9", 0, {}),
    "16_gb18030.txt": (
        ":1: (byte 0) invalid UTF-8 (0xB4: invalid start byte); convert the file to UTF-8, e.g. with iconv "
        "-f GB18030 -t UTF-8",
        0,
        {},
    ),
    "17_single_line_2mb.txt": (None, 1, {}),
    "19_emoji_rtl_combining.txt": (None, 6, {}),
    "20_unicode_line_separators.txt": (None, 6, {}),
    "21_nfc_nfd.txt": (None, 2, {}),
    "23_special_token_text.txt": (None, 4, {}),
    "25_50000_short_lines.txt": (None, 50000, {}),
    "26_ansi_escapes.txt": (None, 1, {}),
    "27_mixed_good_and_bad.txt": (":2: (byte 41) invalid UTF-8 (0xFF", 3, {"empty": 1, "invalid_utf8": 1, "nul": 1}),
    "30_truncated_last_line.jsonl": (":3: (byte 46) not JSON", 2, {"invalid_json": 1}),
    "31_truncated_middle_line.jsonl": (":2: (byte 27) not JSON", 2, {"invalid_json": 1}),
    "32_missing_text_key.jsonl": (':2: (byte 15) no field "text" (fields: "body")', 1, {"missing_key": 3}),
    "33_wrong_type.jsonl": (':1: (byte 0) field "text" is a number', 1, {"wrong_type": 6}),
    "34_not_objects.jsonl": (":1: (byte 0) a list, not an object", 1, {"not_an_object": 5}),
    "35_blank_lines.jsonl": (None, 2, {"empty": 4}),
    "36_empty_text.jsonl": (None, 1, {"empty": 3}),
    "37_duplicate_keys.jsonl": (None, 1, {}),
    "39_nan_infinity.jsonl": (None, 4, {}),
    "40_bom.jsonl": (None, 2, {}),
    "41_crlf.jsonl": (None, 2, {}),
    "43_raw_controls_in_string.jsonl": (
        ":1: (byte 12) not JSON (Invalid control character",
        1,
        {"invalid_json": 1, "nul": 1},
    ),
    "44_invalid_utf8.jsonl": (":1: (byte 13) invalid UTF-8 (0xFF", 1, {"invalid_utf8": 2}),
    "46_not_strict_json.jsonl": (":1: (byte 1) not JSON", 1, {"invalid_json": 4}),
    "47_pretty_printed.jsonl": (":1: (byte 1) not JSON", 0, {}),
    "48_concatenated.jsonl": (":1: (byte 12) more than one JSON value", 0, {}),
    "50_long_text_512k.jsonl": (None, 1, {}),
    "52_json_array_file.jsonl": (":1: (byte 1) not JSON", 1, {"invalid_json": 3}),
    "91_gzip_named.txt": (":1: (byte 0) the file starts with 1F 8B: gzip data", 0, {}),
}
TEXTS = {
    "04_crlf.txt": ["first line", "second line", "fourth line"],
    "07_no_final_newline.txt": ["one", "two", "three"],
    "09_bom_utf8.txt": ["line after a byte order mark", "second"],
    "27_mixed_good_and_bad.txt": [
        "A good line of text that is long enough.",
        "Another good line.",
        "The last good line.",
    ],
    "37_duplicate_keys.jsonl": ["second"],
    "40_bom.jsonl": ["after a byte order mark", "second"],
}


def preprocess(source: Path, out: Path, letters_model: Path, *more: str) -> int:
    return run("--trainpref", source, "--destdir", out, "--tokenizer-path", letters_model, "--workers", 1, *more)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_gives_a_clear_message_or_good_data(test_data, tmp_path, capsys, letters_model, name):
    source = test_data / "hostile" / name
    if not source.exists():
        pytest.skip(f"{source} is missing")
    refusal, documents, skipped = CASES[name]

    code = preprocess(source, tmp_path / "strict", letters_model)
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert code == (0 if refusal is None else 2)
    if refusal is not None:
        assert shown.splitlines()[-1].startswith(f"ftk-preprocess: {source}{refusal}")
        assert list(tmp_path.iterdir()) == []

    code = preprocess(source, tmp_path / "lenient", letters_model, "--on-error", "skip")
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    if not documents:
        assert code == 2
        assert f"{source}: {NO}" in shown
        assert not (tmp_path / "lenient").exists()
        return
    assert code == 0
    assert verify(tmp_path / "lenient") == []
    record = json.loads((tmp_path / "lenient" / "preprocess.json").read_text())["splits"]["train"]
    assert record["documents"] == documents == len(IndexedDataset(tmp_path / "lenient" / "train"))
    assert record["skipped"] == skipped
    assert len(record["problems"]) == sum(count for reason, count in skipped.items() if reason != "empty")
    if refusal is None:
        for file in ("train.bin", "train.idx"):
            assert (tmp_path / "lenient" / file).read_bytes() == (tmp_path / "strict" / file).read_bytes()


@pytest.mark.parametrize("name", TEXTS)
def test_the_good_documents_all_arrive(test_data, tmp_path, letters_model, name):
    assert preprocess(test_data / "hostile" / name, tmp_path / "out", letters_model, "--on-error", "skip") == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    dataset = IndexedDataset(tmp_path / "out" / "train")
    assert [row.tolist() for row in dataset] == [tokenizer.encode(text) for text in TEXTS[name]]


def test_names_of_command_tokens_in_a_corpus_stay_letters(test_data, tmp_path, letters_model):
    assert preprocess(test_data / "hostile" / "23_special_token_text.txt", tmp_path / "out", letters_model) == 0
    tokenizer = load_tokenizer(tmp_path / "out")
    ids = np.unique(IndexedDataset(tmp_path / "out" / "train").tokens)
    assert not set(ids.tolist()) & {token.id for token in tokenizer.command_tokens}


def test_no_other_hostile_file_makes_a_traceback_or_wrong_data(test_data, tmp_path, capsys, letters_model):
    others = [p for p in sorted((test_data / "hostile").iterdir()) if p.name not in CASES]
    assert others
    for source in others:
        for mode in ("raise", "skip"):
            out = tmp_path / f"{source.name}-{mode}"
            code = preprocess(source, out, letters_model, "--on-error", mode)
            assert "Traceback" not in capsys.readouterr().err
            assert code in (0, 2)
            assert out.exists() == (code == 0)
            assert code == 2 or verify(out) == []
