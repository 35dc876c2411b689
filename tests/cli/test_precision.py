"""--precision of commands that generate, and what it means for results that are continued."""

from __future__ import annotations

import json

import pytest

from ftk_cli import checkpoint, generate, interactive

PROMPTS = b"the quick [MASK] fox\njumps [MASK] a lazy dog\nwhile she [MASK] long letters of [MASK] friends\n"
JSON = ("--input", "-", "--output-format", "json", "--max-len", "3", "--min-len", "3")

RESULTS = ("--input", "prompts", "--output-format", "json", "--results-path")


def logprobs(lines):
    return [one for line in lines for answer in json.loads(line)["answers"] for one in answer["token_logprobs"]]


def test_bf16_answers_are_near_those_of_fp32(ask):
    found = {}
    for precision in ("fp32", "bf16"):
        code, out, _ = ask(generate.main, "--path", "run", *JSON, "--precision", precision, stdin=PROMPTS, code=0)
        found[precision] = logprobs(out)
    assert len(found["bf16"]) == len(found["fp32"]) == 12
    assert found["bf16"] != found["fp32"]
    assert found["bf16"] == pytest.approx(found["fp32"], abs=0.1)  # random weights: all are near log 1 / V
    code, plain, _ = ask(generate.main, "--path", "run", *JSON, stdin=PROMPTS)
    assert (code, logprobs(plain)) == (0, found["fp32"])


def test_given_answers_are_scored_in_bf16_too(ask, place):
    (place / "given").write_text("the quick [MASK] fox\tbrown\n")
    found = []
    for precision in ("fp32", "bf16"):
        options = ("--input", "given", "--score-reference", "--output-format", "json", "--precision", precision)
        _, out, _ = ask(generate.main, "--path", "run", *options, code=0)
        found.append(json.loads(out[0]))
    assert found[0] != found[1]


def test_the_prompt_by_prompt_command_has_it_too(ask):
    _, out, _ = ask(interactive.main, "--path", "run", "--precision", "bf16", "--max-len", "3", stdin=PROMPTS, code=0)
    assert len([line for line in out if line.startswith("> ")]) == 3


@pytest.mark.parametrize("main", [generate.main, interactive.main])
def test_other_precisions_are_refused(ask, main):
    source = ("--input", "-") if main is generate.main else ()
    code, out, err = ask(main, "--path", "run", *source, "--precision", "fp8", stdin=PROMPTS)
    assert (code, out, len(err)) == (2, [], 1)
    assert "fp8" in err[0]
    assert "bf16" in err[0]


def test_results_go_on_in_the_precision_in_which_they_were_begun(ask, place, tmp_path):
    (place / "prompts").write_bytes(PROMPTS)
    command = ("--path", "run", *RESULTS, str(tmp_path / "out"))
    assert ask(generate.main, *command, "--precision", "bf16")[0] == 0
    written = (tmp_path / "out").read_bytes()
    _, _, err = ask(generate.main, *command, code=2)
    assert "begun with other settings: precision" in err[0]
    assert (tmp_path / "out").read_bytes() == written


def test_of_rounded_weights_results_go_on_in_batches_of_the_same_size(ask, place, tmp_path):
    if not (place / "run-int8").exists():
        assert ask(checkpoint.main, "export", "run", "run-int8", "--quantize", "int8")[0] == 0
    (place / "prompts").write_bytes(PROMPTS)
    for name, path, options, counts in (
        ("exact", "run", (), False),
        ("int8", "run-int8", (), True),
        ("with int8", "run:run-int8", (), True),
        ("bf16", "run", ("--precision", "bf16"), True),
    ):
        command = ("--path", path, *RESULTS, str(tmp_path / name), *options)
        assert ask(generate.main, *command)[0] == 0
        code, _, err = ask(generate.main, *command, "--batch-size", "2")
        assert code == (2 if counts else 0), name
        assert not counts or "begun with other settings: batch_size" in err[0]
