"""ftk-generate --score-reference, on a small checkpoint: answers of a subset, and those beside prompts."""

from __future__ import annotations

import json
import math

import pytest
import torch

import ftk
from ftk.criterions.glm_cross_entropy import GLMCrossEntropy, GLMCrossEntropyConfig
from ftk.tasks.restore import restore_task
from ftk_cli import generate
from tests.cli.test_generate_command import ask, place  # noqa: F401

SCORE = ["--path", "run", "--score-reference"]


def test_the_sum_over_a_subset_is_the_training_loss(ask, place):  # noqa: F811
    code, out, err = ask(generate.main, "data-bin", *SCORE, "--max-samples", "9", "--output-format", "json")
    assert code == 0
    task, _ = restore_task(place / "run", str(place / "data-bin"))
    samples, model = task.load_split("valid"), ftk.load_model(place / "run")
    for record in map(json.loads, out):
        sample = samples.sample(0, record["id"])
        batch = {
            name: torch.as_tensor(sample[name])[None]
            for name in ("tokens", "targets", "loss_mask", "position_ids", "context_length")
        }
        with torch.no_grad():
            loss = GLMCrossEntropy(GLMCrossEntropyConfig())(model, batch).loss
        assert record["candidates"][0]["logprob"] == pytest.approx(-float(loss), rel=1e-4)
    total = sum(json.loads(line)["candidates"][0]["logprob"] for line in out)
    (summary,) = (line for line in err if "scored" in line)
    assert "scored 9 samples" in summary
    assert f"log-probability {total:.4f}" in summary


def test_answers_beside_prompts_as_tabs_and_as_json(ask, place):  # noqa: F811
    lines = [
        "the quick [MASK] fox [sMASK] .\tbrown\tjumps over",
        json.dumps({"prompt": "the lazy [MASK] while", "candidates": ["dog", ["brown fox"], "dog"]}),
        json.dumps({"prompt": "she reads", "answers": ["long letters"]}),
    ]
    stdin = "\n".join(lines).encode()
    code, out, err = ask(generate.main, *SCORE, "--input", "-", "--output-format", "json", stdin=stdin)
    assert code == 0
    first, second, third = map(json.loads, out)
    filler = ftk.load_generator(place / "run")
    (expected,) = filler.score(["the quick [MASK] fox [sMASK] ."], [["brown", "jumps over"]])
    assert [one["logprob"] for one in first["candidates"][0]["answers"]] == pytest.approx(
        [one.logprob for one in expected], abs=1e-4
    )
    assert first["candidates"][0]["logprob"] == pytest.approx(sum(one.logprob for one in expected), abs=1e-4)
    assert [one["answers"][0]["text"] for one in second["candidates"]] == ["dog", "brown fox", "dog"]
    values = [one["logprob"] for one in second["candidates"]]
    assert values[0] == pytest.approx(values[2], abs=1e-4)
    assert values[second["best"]] == max(values)
    assert third["candidates"][0]["answers"][0]["blank"] == "[gMASK]"

    code, text, _ = ask(generate.main, *SCORE, "--input", "-", stdin=stdin)
    kinds = "".join(line[0] for line in text)
    assert kinds == "S" + "HDP" * 2 + "L" + "S" + "HDPL" * 3 + "SHDPL" + "N"
    shown = [float(line.split("\t")[1]) for line in text if line.startswith("L-1\t")]
    assert shown == pytest.approx(values, abs=1e-3)
    (summary,) = (line for line in err if "scored" in line)
    chosen = [one["candidates"][one["best"]] for one in (first, second, third)]
    tokens = sum(len(answer["token_logprobs"]) for one in chosen for answer in one["answers"])
    perplexity = math.exp(-sum(one["logprob"] for one in chosen) / tokens)
    assert f"({tokens} tokens)" in summary
    assert float(summary.split()[-1]) == pytest.approx(perplexity, rel=1e-3)


def test_without_its_end_an_answer_has_one_token_less(ask):  # noqa: F811
    stdin = b"the lazy [MASK] while\tdog"
    command = [*SCORE, "--input", "-", "--output-format", "json"]
    _, (with_end,), _ = ask(generate.main, *command, stdin=stdin)
    _, (without,), _ = ask(generate.main, *command, "--no-score-end", stdin=stdin)
    ended, open_ended = (json.loads(one)["candidates"][0]["answers"][0] for one in (with_end, without))
    assert len(ended["token_logprobs"]) == len(ended["tokens"]) + 1
    assert open_ended["token_logprobs"] == pytest.approx(ended["token_logprobs"][:-1], abs=1e-5)


def test_bad_lines_are_named_and_the_others_scored(ask):  # noqa: F811
    lines = [
        "the lazy [MASK]\tdog",
        "",
        "the lazy [MASK]",
        "[MASK] the [MASK]\tdog",
        "{the lazy",
        '{"prompt": "the [MASK]"}',
        '{"prompt": "the [MASK]", "answers": [3]}',
        '{"prompt": "the [MASK]", "candidates": []}',
        "the [MASK]\t" + "dog " * 200,
        "the " * 300 + "\tdog",
        "the \0 [MASK]\t\U0001f469",
    ]
    code, out, err = ask(generate.main, *SCORE, "--input", "-", stdin="\n".join(lines).encode())
    assert code == 1
    assert [line.split("\t")[0] for line in out if line[0] == "S"] == ["S-0", "S-10"]
    problems = [line.split("standard input:")[1] for line in err if "standard input:" in line]
    for problem, start in zip(
        problems,
        (
            "2: there is no answer",
            "3: there is no answer",
            "4: 1 answers for 2 blanks",
            "5: not a JSON object",
            "6: a JSON line needs",
            "7: 'answers' must be a list of texts",
            "8: 'candidates' must be a list",
            "9: an answer is ",
            "10: the prompt is ",
            " 9 lines not scored",
        ),
        strict=True,
    ):
        assert problem.startswith(start)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--path", "run", "--input", "text", "--no-score-end"], "it goes with --score-reference --input"),
        (["data-bin", *SCORE, "--no-score-end"], "it goes with --score-reference --input"),
        (["data-bin", *SCORE, "--scoring", "token_f1"], "finds no answers"),
        ([*SCORE, "--input", "nowhere"], "--input nowhere: No such file"),
    ],
)
def test_mistakes_are_named(ask, arguments, message):  # noqa: F811
    code, out, err = ask(generate.main, *arguments)
    assert (code, out, len(err)) == (2, [], 1)
    assert message in err[0]
