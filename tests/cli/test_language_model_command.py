"""--lm-path and --lm-weight: a second checkpoint adds its log-probabilities in both generating commands."""

from __future__ import annotations

import json

import pytest

from ftk import hub
from ftk.errors import UserError
from ftk.tasks.glm_blank import BlankGenerator
from ftk.tasks.glm_blank.infill.language_model import LanguageModel
from ftk_cli import generate, interactive

PROMPTS = b"the quick [MASK] fox jumps [MASK]\na lazy dog [MASK] long letters\n"
JSON = ("--input", "-", "--max-len", "4", "--output-format", "json")


def answers(ask, *options):
    _, out, _ = ask(generate.main, "--path", "run", *JSON, *options, stdin=PROMPTS, code=0)
    return [answer for line in out for answer in json.loads(line)["answers"]]


@pytest.mark.parametrize("options", [(), ("--beam", "3", "--nbest", "2"), ("--sampling", "--top-k", "9")])
def test_json_carries_both_parts(ask, second, options):
    plain = answers(ask, *options)
    fused = answers(ask, *options, "--lm-path", second, "--lm-weight", "3")
    silent = answers(ask, *options, "--lm-path", second, "--lm-weight", "0")
    assert not any("lm_logprobs" in one for one in plain)
    for one in fused:
        assert len(one["lm_logprobs"]) == len(one["token_logprobs"]) > 0
        total = sum(one["token_logprobs"]) + 3 * sum(one["lm_logprobs"])
        assert one["score"] == pytest.approx(total / len(one["token_logprobs"]), abs=1e-4)
        assert all("lm_logprobs" in other for other in one.get("others", ()))
    assert [one["text"] for one in fused] != [one["text"] for one in plain]
    for one in silent:
        for other in (one, *one.get("others", ())):
            del other["lm_logprobs"]
    assert silent == plain


def test_python_the_command_and_the_prompt_agree(ask, place, second):
    filler = hub.load_generator(place / "run", lm_path=f"{place / second}:{place / 'run'}", lm_weight=2.0, max_len=4)
    expected = filler.fill([line.decode() for line in PROMPTS.splitlines()])
    options = ("--lm-path", f"{second}:run", "--lm-weight", "2")
    assert [one["text"] for one in answers(ask, *options)] == [one.text for row in expected for one in row.answers]
    _, out, _ = ask(interactive.main, "--path", "run", "--max-len", "4", *options, stdin=PROMPTS, code=0)
    assert [line for line in out if line in {row.text for row in expected}] == [row.text for row in expected]


def test_a_subset_with_a_language_model(ask, second):
    command = ("data-bin", "--path", "run", "--max-samples", "2", "--max-len", "3", "--output-format", "json")
    _, out, _ = ask(generate.main, *command, "--lm-path", second, code=0)
    assert all(len(one["lm_logprobs"]) > 0 for line in out for one in json.loads(line)["answers"])


def test_the_note_says_what_counts(ask, second):
    command = ("--path", "run", *JSON[:4], "--output-format", "fairseq", "--lm-path", second)
    _, out, _ = ask(generate.main, *command, stdin=PROMPTS, code=0)
    assert out[-1].endswith("; in H and D those of the language model are added 0.2 times")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--lm-path", "nowhere"), "nowhere"),
        (("--lm-path", "foreign"), "has another tokenizer (sentencepiece, 2"),
        (("--lm-path", "run", "--lm-weight", "-1"), "--lm-weight is -1.0; it must be from 0 to 1e6"),
        (("--no-lm-ends",), "--lm-ends is off, but there is no language model; name one by --lm-path"),
        (("--lm-weight", "0.5"), "--lm-weight is 0.5, but there is no language model; name one by --lm-path"),
        (("--lm-path", "run", "--score-reference"), "does not use --lm-path; leave it out"),
    ],
)
def test_what_does_not_fit_is_named(ask, second, options, message):
    _, _, err = ask(generate.main, "--path", "run", "--input", "-", *options, stdin=b"the [MASK]\tfox", code=2)
    assert message in "\n".join(err)


def test_another_language_model_does_not_continue_results(ask, second):
    command = ("--path", "run", *JSON, "--results-path", "fused.jsonl")
    assert ask(generate.main, *command, "--lm-path", second, stdin=PROMPTS)[0] == 0
    assert ask(generate.main, *command, "--lm-path", f"./{second}", stdin=PROMPTS)[0] == 0
    for changed in (("--lm-path", "run"), ("--lm-path", second, "--lm-weight", "0.3"), ()):
        _, _, err = ask(generate.main, *command, *changed, stdin=PROMPTS, code=2)
        assert "begun with other settings: lm_" in err[0]


def test_a_path_needs_who_opens_it(place):
    model, tokenizer = hub.load_model(place / "run"), hub.load_tokenizer(place / "run")
    with pytest.raises(UserError, match=r"ftk.load_generator opens it"):
        BlankGenerator(model, tokenizer.special, lm_path="run")
    generator = BlankGenerator(model, tokenizer.special, language_model=LanguageModel(model, tokenizer.special, 0.5))
    assert generator.language_model.fusion == (0.5, True)
