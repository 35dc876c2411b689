"""What ftk-generate prints of answers and mistakes, in both formats and in colours, and how it reads lines."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

from ftk.errors import UserError
from ftk.generation.results import Span, TextAnswer, TextPiece, TextResult
from ftk.tokenizers import load_tokenizer
from ftk_cli import generate, prompts
from ftk_cli.colors import color_legend, colored_piece, colored_text, use_color
from ftk_cli.generate_options import GenerateConfig
from ftk_cli.prompts import Lines, prompt_lines
from ftk_cli.records import Records, one_line


def test_errors_stop_if_wanted_behind_the_answers_before_them(ask):
    prompts = b"the [MASK] fox\nshe reads\n\nold [MASK]\n"
    command = (generate.main, "--path", "run", "--input", "-", "--on-error", "stop", "--output-format", "fairseq")
    _, out, err = ask(*command, stdin=prompts, code=2)
    assert err[-1].startswith("ftk-generate: standard input:3: the prompt is empty")
    assert [line.split("\t")[0] for line in out if line[0] in "SE"] == ["S-0", "S-1"]


def test_errors_in_json_and_lines_that_are_no_prompts(ask):
    prompts = b"the [MASK] fox\n" + b"x" * 3_000_000 + b"\n" + b"fox " * 25_000 + b"\nold\0 \xe2\x80\xae[MASK]\n"
    code, out, _ = ask(
        *(generate.main, "--path", "run", "--input", "-", "--output-format", "json", "--max-len", "2"), stdin=prompts
    )
    first, huge, long, odd = map(json.loads, out)
    assert code == 1
    assert (huge["id"], huge["line"]) == (1, 2)
    assert huge["error"].startswith("the line is longer than 1048576 bytes")
    assert "tokens long, but the model has" in long["error"]
    assert first["answers"][0]["text"] is not None
    assert odd["source"] == "old\0 \u202e[MASK]"


def test_an_empty_answer_beside_a_reference_is_shown_with_its_prompt():
    answer = TextAnswer(text="", tokens=[], token_logprobs=[], score=-1.0)
    result = TextResult(prompt="a\nquestion", text="", answers=[answer])
    lines = Records(None, "text").answered(7, result, ["cats"])
    assert lines == ["7: a\\nquestion", "  1. ''  (reference: 'cats')"]


def test_steps_are_the_tokens_of_the_best_answers(ask):
    command = (generate.main, "--path", "run", "--input", "-", "--max-len", "3", "--print-step")
    _, out, _ = ask(*command, "--output-format", "fairseq", stdin=b"the [MASK] fox [MASK]\n")
    steps = sum(len(line.split("\t")[1].split()) for line in out if line.startswith("P-"))
    assert [line for line in out if line.startswith("I-")] == [f"I-0\t{steps}"]
    assert ask(*command, stdin=b"the [MASK] fox [MASK]\n")[1][1:] == [f"  {steps} steps"]
    _, out, _ = ask(*command, "--output-format", "json", stdin=b"the [MASK] fox [MASK]\n")
    assert json.loads(out[0])["steps"] == steps


def test_memory_does_not_grow_with_the_input(tmp_path):
    path = tmp_path / "many"
    path.write_bytes(b"x" * 500_000 + b"\n" + b"the [MASK] fox\n" * 300_000)
    tracemalloc.start()
    with open(path, "rb") as stream:
        blocks = list(map(len, Lines(GenerateConfig(path="run"), stream).blocks(64)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(blocks) == 300_001
    assert peak < 4_000_000


def test_a_line_without_an_end_is_named_and_not_kept(monkeypatch):
    monkeypatch.setattr(prompts, "_ENDLESS_BYTES", 1 << 24)
    tracemalloc.start()
    with open("/dev/zero", "rb") as stream, pytest.raises(UserError, match="/dev/zero:1: no line end within 16777216"):
        list(prompt_lines(stream, "/dev/zero"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 23  # half of what was read


def test_alternatives_in_both_formats(ask):
    command = (generate.main, "--path", "run", "--input", "-", "--max-len", "3", "--alternatives", "2")
    nbest = (*command, "--beam", "3", "--nbest", "2")
    _, text, _ = ask(*nbest, "--output-format", "fairseq", stdin=b"the [MASK] fox [MASK]\n")
    _, out, _ = ask(*command, "--beam", "3", "--nbest", "2", "--output-format", "json", stdin=b"the [MASK] fox [MASK]")
    answers = [one for answer in json.loads(out[0])["answers"] for one in (answer, *answer["others"])]
    assert len(answers) == 4
    for answer in answers:
        assert len(answer["alternatives"]) == len(answer["token_logprobs"])
        for there, logprob in zip(answer["alternatives"], answer["token_logprobs"], strict=True):
            assert len(there) == 2
            assert there[0]["logprob"] >= max(there[1]["logprob"], logprob)
    spelling = load_tokenizer("run/checkpoint_1").token_text
    shown = [
        "\t".join(f"{spelling(one['token']).replace(' ', '▁')} {one['logprob']:.4f}" for one in there)
        for answer in answers
        for there in answer["alternatives"]
    ]
    assert shown == [line.split("\t", 1)[1] for line in text if line.startswith("A-")]
    lines = ask(*nbest, stdin=b"the [MASK] fox [MASK]")[1]
    places = iter(len(answer["alternatives"]) for answer in answers)
    expected = [[start, *["       token "] * next(places)] for start in ("  1. ", "     or ", "  2. ", "     or ")]
    assert len(lines) == 1 + sum(map(len, expected))
    for line, start in zip(lines[1:], (one for lines_of_answer in expected for one in lines_of_answer), strict=True):
        assert line.startswith(start)


class WORDS:
    """Tokens as a byte-level tokenizer decodes them."""

    pieces: ClassVar[dict[int, bytes]] = {7: b" red", 8: b"\nfox", 9: b" \xe2\x82", 10: b"\xac"}

    @classmethod
    def decode(cls, tokens):
        return b"".join(cls.pieces[token] for token in tokens).decode("utf-8", errors="replace")


def test_colors_where_they_are_wanted_and_never_in_a_pipe(ask, monkeypatch):
    command = (generate.main, "--path", "run", "--input", "-", "--output-format", "fairseq")
    command = (*command, "--max-len", "3", "--min-len", "1", "--color")
    prompt = b"the [MASK] fox\n"
    plain = [line for line in ask(*command, "never", stdin=prompt)[1] if line[0] == "F"]
    assert "\x1b" not in plain[0]
    assert [line for line in ask(*command, "auto", stdin=prompt)[1] if line[0] == "F"] == plain  # not a terminal
    (colored,) = [line for line in ask(*command, "always", stdin=prompt)[1] if line[0] == "F"]
    assert re.sub(r"\x1b\[[\d;]+m", "", colored) == plain[0]
    assert re.search(r"^F-0\tthe \x1b\[4;3[1236]m", colored)
    for choice, notes in (("never", 0), ("always", 1)):
        assert sum("probabilities of tokens" in line for line in ask(*command, choice, stdin=prompt)[1]) == notes


@pytest.mark.parametrize(
    ("choice", "environment", "expected"),
    [
        ("auto", {}, True),
        ("auto", {"NO_COLOR": "1"}, False),
        ("auto", {"NO_COLOR": ""}, True),  # https://no-color.org: present and not empty
        ("auto", {"TERM": "dumb"}, False),
        ("always", {"NO_COLOR": "1"}, True),
        ("never", {}, False),
    ],
)
def test_who_decides_about_colors(monkeypatch, choice, environment, expected):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert use_color(choice, SimpleNamespace(isatty=lambda: True)) is expected
    assert use_color("auto", SimpleNamespace(isatty=lambda: False)) is False


@pytest.mark.parametrize(("probability", "color"), [(0.9, 32), (0.6, 36), (0.3, 33), (0.01, 31), (0.0, 31)])
def test_colors_say_how_probable_a_token_of_the_answer_is(probability, color):
    logprob = math.log(probability) if probability else -math.inf
    answer = TextAnswer("red\nfox", [7, 8], [logprob, logprob], logprob)
    result = TextResult("a [MASK] b", "a red\nfox b", [answer], ((2, 9),))
    assert colored_text(result, WORDS, one_line) == f"a \x1b[4;{color}mred\\nfox\x1b[0m b"
    assert colored_text(result, WORDS, str) == f"a \x1b[4;{color}mred\nfox\x1b[0m b"


def test_each_token_has_its_own_color_and_no_character_two():
    logprobs = [math.log(0.9), math.log(0.3), math.log(0.9), math.log(0.1), math.log(0.01)]  # the last: an end token
    answer = TextAnswer("red\nfox €", [7, 8, 9, 10], logprobs, 0.0)
    result = TextResult("a [MASK]", "a red\nfox €", [answer], ((2, 11),))
    # The two halves of the euro sign: the square root of 0.9 times 0.1 is 0.3, as yellow as the fox.
    assert colored_text(result, WORDS, one_line) == "a \x1b[4;32mred\x1b[0m\x1b[4;33m\\nfox €\x1b[0m"
    piece = TextPiece(0, 0, "red\nfox €", [7, 8, 9, 10], logprobs, " red\nfox € b", (Span(0, 10, 0),))
    assert colored_piece(piece, {}, WORDS) == "\x1b[4;32m red\x1b[0m\x1b[4;33m\nfox €\x1b[0m b"
    assert colored_piece(replace(piece, number=1), {0: answer}, WORDS) == colored_piece(piece, {}, WORDS)


def test_the_legend_shows_every_color():
    legend = color_legend()
    assert re.findall(r"\x1b\[4;(\d+)m([^\x1b]+)\x1b\[0m", legend) == [
        *(("32", "0.8 and more"), ("36", "0.5 and more"), ("33", "0.2 and more"), ("31", "less"))
    ]
