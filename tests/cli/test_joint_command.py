"""--nbest-over text: the n best ways to fill a text, in lines, JSON and on the screen."""

from __future__ import annotations

import json
import re

import pytest

from ftk import hub
from ftk_cli import generate, interactive
from ftk_cli.records import one_line

PROMPTS = "the quick [MASK] fox jumps [MASK]\na lazy dog [MASK] long letters\n"
OPTIONS = ("--beam", "3", "--nbest", "3", "--nbest-over", "text", "--max-len", "4")


@pytest.fixture(scope="module")
def expected(place):
    filler = hub.load_generator(place / "run", beam=3, nbest=3, nbest_over="text", max_len=4)
    return filler.fill(PROMPTS.splitlines())


def ways(result):
    return [result, *result.others]


def test_results_hold_the_ways_best_first(expected):
    for result in expected:
        assert len(result.others) == 2
        scores = [way.score for way in ways(result)]
        assert scores == sorted(scores, reverse=True)
        assert len({str([answer.tokens for answer in way.answers]) for way in ways(result)}) == 3
        for way in ways(result):
            total = sum(sum(answer.token_logprobs) for answer in way.answers)
            length = sum(len(answer.token_logprobs) for answer in way.answers)
            assert way.score == pytest.approx(total / length, abs=1e-4)
            for (start, end), answer in zip(way.spans, way.answers, strict=True):
                assert way.text[start:end].strip() == answer.text


def test_json(ask, expected):
    _, out, _ = ask(
        generate.main,
        *("--path", "run", "--input", "-", "--output-format", "json", *OPTIONS),
        stdin=PROMPTS.encode(),
        code=0,
    )
    for line, result in zip(map(json.loads, out), expected, strict=True):
        for record, way in zip([line, *line["others"]], ways(result), strict=True):
            assert record["text"] == way.text
            assert record["score"] == pytest.approx(way.score, abs=1e-6)
            assert [answer["tokens"] for answer in record["answers"]] == [answer.tokens for answer in way.answers]
            assert not any("others" in answer for answer in record["answers"])


def test_lines(ask, expected):
    command = ("--path", "run", "--input", "-", *OPTIONS)
    _, out, _ = ask(generate.main, *command, "--output-format", "fairseq", stdin=PROMPTS.encode(), code=0)
    assert out[-1].endswith("; N the same for all answers to a text together")
    for index, result in enumerate(expected):
        own = [line.split("\t") for line in out if re.match(rf"[A-Z]-{index}(\.\d)?\t", line)]
        blanks = ["H", "D", "P"] * len(result.answers)
        assert [parts[0][0] for parts in own] == ["S", *["N", *blanks] * 3, "F"]
        found = [parts[1:] for parts in own if parts[0][0] == "N"]
        assert found == [[f"{way.score:.4f}", way.text] for way in ways(result)]
    _, out, _ = ask(generate.main, *command, stdin=PROMPTS.encode())
    assert out == [f"{'or ' * (way is not result)}{one_line(way.text)}" for result in expected for way in ways(result)]


def test_a_subset_and_its_scores(ask, expected):
    command = ("data-bin", "--path", "run", "--max-samples", "3", *OPTIONS)
    _, out, _ = ask(generate.main, *command, "--scoring", "exact_match", "--output-format", "fairseq", code=0)
    assert sum(line.startswith("N-") for line in out) == 9
    samples = {line[2:].split("\t")[0] for line in out if line.startswith("S-")}
    assert samples == {"0", "1", "2"}
    assert "exact_match" in out[-1]
    _, out, _ = ask(generate.main, *command, "--output-format", "json")
    for record in map(json.loads, out):
        assert len(record["others"]) == 2
        assert all("reference" in answer for answer in record["answers"])


def test_results_are_continued(ask, place):
    command = ("--path", "run", "--input", "-", "--output-format", "json", *OPTIONS, "--results-path")
    assert ask(generate.main, *command, "whole.txt", stdin=PROMPTS.encode())[0] == 0
    whole = (place / "whole.txt").read_text()
    assert ask(generate.main, *command, "part.txt", stdin=PROMPTS.encode())[0] == 0
    lines = (place / "part.txt").read_text().splitlines(keepends=True)
    (place / "part.txt").write_text(lines[0] + lines[1][:20])
    assert ask(generate.main, *command, "part.txt", stdin=PROMPTS.encode())[0] == 0
    assert (place / "part.txt").read_text() == whole
    _, _, err = ask(
        generate.main, *command[:-7], "--beam", "3", "--results-path", "part.txt", stdin=b"x [MASK]", code=2
    )
    assert "begun with other settings" in err[0]


def test_on_the_screen(ask, expected):
    _, out, _ = ask(interactive.main, "--path", "run", *OPTIONS, stdin=PROMPTS.encode(), code=0)
    for result in expected:
        assert result.text in out
        for other in result.others:
            assert f"  or {other.text}" in out
        for way in ways(result):
            assert f"  all: score {way.score:.4f}" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--nbest-over is text, but greedy search does not use it"),
        (("--beam", "2", "--blank-order", "confident"), "name the --blank-order"),
    ],
)
def test_what_does_not_fit_is_named(ask, options, message):
    _, _, err = ask(
        generate.main, "--path", "run", "--input", "-", "--nbest-over", "text", *options, stdin=b"the [MASK]", code=2
    )
    assert message in "\n".join(err)
