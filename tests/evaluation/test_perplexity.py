"""Perplexity: each token counts once, in the windows of Du et al. (2022), by tokens, words and bytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ftk.errors import UserError
from ftk.evaluation.evaluation import build_evaluation
from ftk.evaluation.metrics import measure
from ftk.evaluation.perplexity import count_units, detokenize_wikitext, read_documents, windows
from tests.evaluation.conftest import FAMILIES, all_logprobs, slow_logprobs
from tests.small_run import LINES, SENTENCE

TEXT = f"{LINES[0]}\n{LINES[9]}\n"


def evaluated(path: Path, generator: Any, line: str, limit: int | None = None) -> tuple[list[Any], dict[str, Any]]:
    evaluation = build_evaluation(line)
    records = evaluation.records(evaluation.questions(str(path), generator, limit), generator)
    return records, measure(evaluation.metrics(), records, evaluation.group, draws=20)


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, []),
        (2, [(1, 2)]),
        (8, [(1, 8)]),
        (9, [(1, 8), (8, 9)]),
        (14, [(1, 8), (8, 11), (11, 14)]),
        (16, [(1, 8), (8, 11), (11, 14), (14, 16)]),
    ],
)
def test_each_token_but_the_first_counts_in_one_window(length: int, expected: list[tuple[int, int]]) -> None:
    assert [*windows(length, 8, 3)] == expected


@pytest.mark.parametrize("uni", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_is_that_of_one_forward_for_each_token(families, tmp_path, family: str, uni: bool) -> None:
    generator, path = families[family], tmp_path / "text"
    path.write_text(TEXT)
    ids, window, stride = generator.tokenizer.encode(TEXT), 16, 5
    assert len(ids) > window + 3 * stride
    total = 0.0
    for place in range(1, len(ids)):
        start, context = 0, 1
        if place >= window:
            start = ((place - window) // stride + 1) * stride  # of the window that counts this token
            context = window - stride
        seen, read = ids[start : start + context], ids[start + context : place]
        if uni:
            seen, read = ids[start : start + 1], ids[start + 1 : place]
        total += float(all_logprobs(family, generator, seen, read)[ids[place]])
    options = f"window={window} stride={stride} unidirectional={str(uni).lower()}"
    records, measured = evaluated(path, generator, f"perplexity {options}")
    assert sum(record["tokens"] for record in records) == len(ids) - 1
    assert sum(record["logprob"] for record in records) == pytest.approx(total, abs=1e-4)
    words = len(TEXT.split()) + 2
    assert measured["perplexity"].value == pytest.approx(math.exp(-total / (len(ids) - 1)), rel=1e-5)
    assert measured["word_perplexity"].value == pytest.approx(math.exp(-total / words), rel=1e-5)
    spaced = len(TEXT.strip().split(" "))
    assert measured["adjusted_perplexity"].value == pytest.approx(math.exp(-total / (spaced - 1)), rel=1e-5)
    assert measured["bits_per_character"].value == measured["bits_per_byte"].value  # all are of one byte
    assert measured["bits_per_byte"].value == pytest.approx(-total / math.log(2) / len(TEXT), rel=1e-5)
    assert measured["perplexity"].standard_error > 0


def test_a_window_that_holds_the_whole_text_is_the_text_read_once(families, tmp_path) -> None:
    generator, path = families["gpt2"], tmp_path / "text"
    path.write_text(SENTENCE)
    ids = generator.tokenizer.encode(SENTENCE)
    (record,), _ = evaluated(path, generator, "perplexity")
    logprobs, _ = slow_logprobs("gpt2", generator, ids[:1], ids[1:])
    assert record["logprob"] == pytest.approx(sum(logprobs), abs=1e-5)
    assert (record["start"], record["context"], record["tokens"]) == (1, 1, len(ids) - 1)


def test_a_text_without_spaces_has_no_perplexity_of_words(families, tmp_path) -> None:
    (tmp_path / "text").write_text("紐落藤披架花殘菊破叢葉鋪荒草蔓流竭半池空紉珮蘭凋徑")
    _, measured = evaluated(tmp_path / "text", families["gpt2"], "perplexity")
    undefined = [name for name, metric in measured.items() if metric.value is None]
    assert undefined == ["word_perplexity", "adjusted_perplexity"]


def test_documents_are_files_lines_or_rows(tmp_path) -> None:
    text, rows = tmp_path / "text.txt", tmp_path / "rows.jsonl"
    text.write_text(" one two \n\n three \n")
    rows.write_text('{"text": "one two"}\n{"text": "three"}\n')
    assert [*read_documents(str(text), False)] == [(str(text), " one two \n\n three \n")]
    assert [*read_documents(str(text), True)] == [(f"{text}:1", "one two"), (f"{text}:3", "three")]
    assert [*read_documents(str(rows), False)] == [(f"{rows}:1", "one two"), (f"{rows}:2", "three")]


def test_a_limit_takes_the_first_windows(families, tmp_path) -> None:
    (tmp_path / "text").write_text(TEXT)
    line = "perplexity window=8"
    whole, _ = evaluated(tmp_path / "text", families["gpt2"], line)
    some, measured = evaluated(tmp_path / "text", families["gpt2"], line, limit=2)
    assert [record["idx"] for record in some] == [0, 1]
    assert measured["word_perplexity"].value is not None
    assert some[0]["words"] == whole[0]["words"]


def test_settings_say_the_window_that_was_taken(families) -> None:
    settings = build_evaluation("perplexity").settings(families["gpt2"])
    assert (settings["window"], settings["stride"]) == (127, 32)
    assert build_evaluation("perplexity stride=9").settings(families["t5"])["window"] == 1023


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        (b"", "perplexity", "text holds no text of two tokens or more"),
        (b"a b\nc \xff", "perplexity", "text:2: not UTF-8"),
        (b"a b c", "perplexity window=4 stride=4", "stride is 4; it must be below window 4"),
        (b"a b c", "perplexity stride=400", "stride 400 leaves no context in windows of 127 tokens"),
        (b"a b c " * 200, "perplexity window=200", "positions"),
    ],
)
def test_what_cannot_be_evaluated_is_named(families, tmp_path, content: bytes, line: str, message: str) -> None:
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(UserError, match=message):
        evaluated(tmp_path / "text", families["gpt2"], line)


def test_wikitext_is_detokenized_by_the_rules_of_megatron() -> None:
    written = ' = Robert = \n \n a guest @-@ starring role ( as " Craig " ) , 1 @,@ 000 m \'s . \n = = Early = = \n'
    assert detokenize_wikitext(written) == (
        ' = Robert =\n\na guest-starring role (as "Craig"), 1,000 m\'s.\n== Early ==\n'
    )


def test_words_of_wikitext_2_are_counted_as_usual(test_data) -> None:
    for name, words, spaced in (("test", 245_569, 245_566), ("valid", 217_646, None)):
        file = test_data / "lambada" / f"wikitext2_{name}.txt"
        if not file.exists():
            pytest.skip(f"{file} is missing")
        units = count_units(file.read_text(encoding="utf-8"))
        assert units["words"] == words
        assert spaced is None or units["spaced"] == spaced
        assert units["bytes"] == file.stat().st_size


def test_jsonl_rows_and_their_shares_add_up(families, tmp_path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES[:3]))
    records, _ = evaluated(path, families["gpt2"], "perplexity window=8 stride=3")
    assert len({record["document"] for record in records}) == 3
    for unit in ("words", "spaced", "bytes"):
        total = sum(count_units(line)[unit] for line in LINES[:3])
        assert sum(record[unit] for record in records) == pytest.approx(total)
