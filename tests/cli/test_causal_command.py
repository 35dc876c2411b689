"""ftk-generate and ftk-interactive with a task that continues plain text, and how far it is to the model."""

# ruff: noqa: F811  (a fixture is imported)
from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

import pytest

import ftk
from ftk.errors import UserError
from ftk.modules import transformer_layer
from ftk_cli import generate, interactive
from tests.generation.test_text import PROMPTS, run  # noqa: F401  (fixture)

ROOT = Path(ftk.__file__).resolve().parents[1]
STDIN = "\n".join(PROMPTS).encode()


def test_prompts_are_continued_in_both_formats(ask, run):
    generator = ftk.load_generator(run, max_len=5, beam=2, nbest=2)
    expected = generator.generate(PROMPTS)
    for call in (generator.fill, generator.score_candidates):
        with pytest.raises(UserError, match="TextContinuer has no '.*', which other models have; use 'generate'"):
            call(PROMPTS, [["a"]])
    command = (generate.main, "--path", str(run), "--input", "-", "--max-len", "5", "--beam", "2", "--nbest", "2")
    _, out, _ = ask(*command, "--output-format", "json", stdin=STDIN, code=0)
    for record, result in zip(map(json.loads, out), expected, strict=True):
        (answer,) = record["answers"]
        assert (record["source"], record["text"]) == (result.prompt, result.text)
        assert answer["tokens"] == list(result.answers[0].tokens)
        assert [one["text"] for one in answer["others"]] == [one.text for one in result.answers[0].others]
        assert set(answer) == {"text", "tokens", "score", "token_logprobs", "others"}
    _, out, _ = ask(*command, "--output-format", "fairseq", stdin=STDIN)
    assert [line for line in out if line[0] == "F"] == [f"F-{n}\t{one.text}" for n, one in enumerate(expected)]
    assert sum(line.startswith("H-0\t") for line in out) == 2  # one answer: no number of its own
    _, out, _ = ask(*command, stdin=STDIN)
    assert [line for line in out if line[0] != " "] == [one.text for one in expected]
    shown = [f"     or {other.text!r}" for one in expected for other in one.answers[0].others]
    assert [line for line in out if line.startswith("     or ")] == shown
    _, out, err = ask(interactive.main, *command[1:3], *command[5:], "--color", "always", stdin=STDIN)
    assert err == []
    assert sum(line.startswith("  1. '") for line in out) == len(PROMPTS)


def test_given_continuations_are_scored_and_results_continued(ask, run, tmp_path):
    (tmp_path / "given").write_text("over a\t lazy dog\nover a\ttwo\tanswers\n")
    results = ("--output-format", "json", "--results-path", str(tmp_path / "results"))
    command = (generate.main, "--path", str(run), "--input", str(tmp_path / "given"), "--score-reference", *results)
    code, out, _ = ask(*command)
    assert (code, out) == (1, [])
    whole = (tmp_path / "results").read_bytes()
    scored, refused = map(json.loads, whole.splitlines())
    (answer,) = scored["candidates"][0]["answers"]
    assert len(answer["token_logprobs"]) == len(answer["tokens"]) + 1
    assert answer["text"] == " lazy dog"
    assert refused["error"].startswith("a prompt is continued by one answer")
    (tmp_path / "results").write_bytes(whole[:30])
    assert ask(*command)[0] == 1
    assert (tmp_path / "results").read_bytes() == whole


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--input", "-", "--blank-order", "left"), "--blank-order belongs to a model of the task glm_blank"),
        (("--input", "-", "--max-len", "65"), "max_len is 65, but the model has 64 positions"),
        (("--chat",), "did not learn from conversations, and its tokenizer has no chat template; leave --chat out"),
    ],
)
def test_what_another_task_has_is_refused(ask, run, arguments, message):
    main = interactive.main if "--chat" in arguments else generate.main
    code, out, err = ask(main, "--path", str(run), *arguments, stdin=STDIN)
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]


@pytest.mark.parametrize("task", ["blanks", "continuation"])
def test_eight_calls_lead_from_a_prompt_to_a_layer(ask, run, monkeypatch, task):
    found, forward = set(), transformer_layer.TransformerLayer.forward

    def traced(self, *arguments):
        names = [
            frame.f_code.co_name
            for frame, _ in traceback.walk_stack(sys._getframe())
            if any(Path(frame.f_code.co_filename).is_relative_to(ROOT / room) for room in ("ftk", "ftk_cli"))
        ]
        found.add((*reversed(names[: names.index("run") + 1]), "forward"))
        return forward(self, *arguments)

    monkeypatch.setattr(transformer_layer.TransformerLayer, "forward", traced)
    path = "run" if task == "blanks" else str(run)
    assert ask(generate.main, "--path", path, "--input", "-", "--max-len", "4", stdin=b"the [MASK] fox\n")[0] == 0
    assert {calls[:5] for calls in found} == {("run", "body", "generate_encoded", "collect", "events")}
    assert max(map(len, found)) <= 9  # `run`, and eight calls
