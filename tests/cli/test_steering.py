"""The options of the section "logits processors", through ftk-generate and ftk-interactive."""

from __future__ import annotations

import json
import re

import pytest

import ftk
from ftk_cli import generate, interactive

PROMPTS = b"she reads [MASK] of old [MASK] .\nthe fox jumps [MASK]\n"
GENERATE = ("--path", "run", "--input", "-", "--output-format", "json")


@pytest.fixture
def answers(ask):
    def call(*arguments):
        _, out, _ = ask(generate.main, *GENERATE, *arguments, stdin=PROMPTS, code=0)
        return [json.loads(line)["answers"] for line in out]

    return call


def texts(rows):
    return [answer["text"] for row in rows for answer in row]


def test_prefixes_for_all_and_for_each(answers):
    assert all(text.startswith("quick") for text in texts(answers("--prefix", "quick")))
    (first, second), (third,) = answers("--prefix", "", "quick", "--beam", "2")
    assert second["text"].startswith("quick")
    free = texts(answers("--beam", "2"))
    assert [first["text"], third["text"]] == [free[0], free[2]]


def test_lengths_of_each_blank(answers):
    for first, *others in answers("--max-lens", "2", "--min-lens", "2,5", "--max-len", "9"):
        assert len(first["tokens"]) == 2
        assert all(5 <= len(other["tokens"]) <= 9 for other in others)


def test_no_token_twice_and_penalties(answers):
    for row in answers("--no-repeat-ngram-size", "1", "--min-len", "8"):
        assert all(len(set(answer["tokens"])) == len(answer["tokens"]) >= 8 for answer in row)
    plain = answers("--min-len", "8")
    penalized = answers("--min-len", "8", "--repetition-penalty", "5", "--repetition-penalty-prompt")

    def repeated(rows):
        return sum(len(answer["tokens"]) - len(set(answer["tokens"])) for row in rows for answer in row)

    assert repeated(penalized) < repeated(plain)


def test_constraints_and_forbidden_words(answers, tmp_path):
    (tmp_path / "words").write_text("fox\n")
    found = answers(
        *("--beam", "3", "--constraints", "dog", "letters", "--ordered-constraints", "--max-len", "20"),
        *("--forbid-words", "a", "--forbid-words-file", str(tmp_path / "words"), "--unk-penalty", "inf"),
    )
    for text in texts(found):
        assert text.find("dog") < text.find("letters")
        assert text.find("dog") >= 0
        assert "fox" not in text
    (first, second), _ = answers("--constraints", "dog", "--constraint-blanks", "2")
    assert "dog" in second["text"]
    assert "dog" not in first["text"]


def test_a_stop_text_cuts(answers):
    free = answers("--min-len", "6")
    stop = max(free[0][0]["text"][2:].split(), key=len)[:2]
    cut = answers("--min-len", "6", "--stop", stop)
    assert all(stop not in text for text in texts(cut))
    assert free[0][0]["text"].startswith(cut[0][0]["text"])


def test_a_contradiction_is_one_line_and_exit_code_2(ask):
    for main, where in ((generate.main, GENERATE), (interactive.main, ("--path", "run"))):
        _, _, err = ask(main, *where, "--prefix", "fox", "--forbid-words", "fox", stdin=PROMPTS, code=2)
        assert len(err) == 1
        assert "prefix 'fox' must come, but 'fox' in it is forbidden" in err[0]


def test_interactive_is_steered_too(ask):
    _, out, _ = ask(interactive.main, "--path", "run", "--prefix", "quick", stdin=b"the [MASK] fox\n", code=0)
    assert any(line.startswith("the quick") for line in out)


def test_python_takes_the_same_options_and_a_function(place):
    fox = set(ftk.load_tokenizer(place / "run").encode("fox"))

    def only_fox(context, blank, tokens):
        return fox if len(tokens) < 4 else []

    filler = ftk.load_generator(place / "run", allowed_tokens=only_fox, max_len=9)
    (answer,) = filler.fill(["the [MASK] dog"])[0].answers
    assert set(answer.tokens) <= fox
    assert len(answer.tokens) == 4
    (answer,) = ftk.load_generator(place / "run", beam=2, prefix=["lazy"]).fill(["the [MASK] dog"])[0].answers
    assert answer.text.startswith("lazy")
    with pytest.raises(ftk.errors.UserError, match="did you mean 'forbid_words'"):
        ftk.load_generator(place / "run", forbid_word=["a"])


GUIDED = "needs llguidance (pip install ftk[guided])"


def test_answers_match_a_guide_of_the_command_of_a_file_and_of_a_line(ask, answers, tmp_path):
    pytest.importorskip("llguidance", reason=GUIDED)
    dates = "regex:[0-9]{2}-[0-9]{2}"
    assert all(re.fullmatch("[0-9]{2}-[0-9]{2}", text) for text in texts(answers("--guide", dates, "--beam", "2")))
    (first, second), (third,) = answers("--guide", 'choice:["yes", "no"]', "regex:x{1,5}y", "--sampling")
    assert first["text"] in ("yes", "no")
    assert third["text"] in ("yes", "no")
    assert re.fullmatch("x{1,5}y", second["text"])
    schema = {"type": "object", "properties": {"a": {"enum": [1, True]}}, "required": ["a"]}
    schema |= {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}
    (tmp_path / "a.json").write_text(json.dumps(schema))
    for text in texts(answers("--guide-file", str(tmp_path / "a.json"))):
        assert json.loads(text)["a"] in (1, True)
    lines = [{"prompt": "the [MASK] fox", "guide": schema}, {"prompt": "the [MASK]", "guide": "regex:cat|dog"}]
    stdin = "\n".join(map(json.dumps, lines)).encode()
    _, out, _ = ask(generate.main, *GENERATE, "--input-format", "json", "--guide", dates, stdin=stdin, code=0)
    one, other = texts(json.loads(line)["answers"] for line in out)
    assert json.loads(one)["a"] in (1, True)
    assert other in ("cat", "dog")
    _, out, _ = ask(interactive.main, "--path", "run", "--guide", "regex:qq", stdin=b"the [MASK] fox\n", code=0)
    assert any("the qq fox" in line for line in out)


def test_a_guide_that_cannot_be_compiled_is_one_line_and_exit_code_2(ask):
    pytest.importorskip("llguidance", reason=GUIDED)
    for main, where in ((generate.main, GENERATE), (interactive.main, ("--path", "run"))):
        code, out, err = ask(main, *where, "--guide", "regex:(a", stdin=PROMPTS)
        assert (code, len(out), len(err)) == (2, 0, 1)
        assert "guide regex:(a: " in err[0]
        assert "unclosed group" in err[0]
