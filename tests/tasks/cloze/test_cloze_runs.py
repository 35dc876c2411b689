"""Runs of the task cloze: learned by heart, resumed, of adapters and prompt tokens, on several ranks."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import ftk
from ftk.checkpoint.adapter import FACTS
from ftk.checkpoint.load import load_model_tensors
from ftk_cli import checkpoint, evaluate, generate, train, validate
from ftk_cli import data as data_command
from tests.distributed import run_jobs
from tests.records import assert_same_weights, records_of
from tests.tasks.cloze.made import BOOLQ, COPA, FAMILIES, boolq_rows, copa_rows, make_model, write_rows
from tests.tasks.runs import PARALLEL, assert_ranks_agree, learning
from tests.tiers import slow_but
from tests.trainer.parallel_jobs import run_all, run_records


def settings_of(here, data: Path, results: Path, *path: object) -> dict[str, Any]:
    """How a model's evaluation of the split valid asked."""
    asked = ["--evaluation", "boolq", "--data", data / "valid.jsonl", "--bootstrap", 0, "--device", "cpu"]
    here(evaluate.main, *asked, "--path", *path, "--output", results, code=0)
    return json.loads((results / "results.json").read_text())["results"][0]["settings"]


@pytest.mark.parametrize(
    ("name", "family"),
    slow_but([("boolq", "glm")], [(n, f) for n in ("boolq", "copa") for f in FAMILIES]),
)
def test_rows_are_learned_by_heart_and_validated(name, family, tmp_path, here, learn, bases) -> None:
    rows = boolq_rows(16) if name == "boolq" else copa_rows(8)
    data = write_rows(tmp_path / "rows", train=rows, val=rows)
    run = tmp_path / "run"
    rarely = ["--validate-interval", 0, "--validate-interval-updates", 40, "--save-interval", 0]
    given = ["--cloze", name, "--pattern", 0, "--max-update", 120, *rarely]
    learn("cloze", data, bases(family), run, *given, "--best-metric", "accuracy")
    valid = records_of(run, "valid")
    assert max(record["accuracy"] for record in valid) == 1.0
    assert valid[-1]["num_targets"] == len(rows)
    assert "ppl" not in valid[-1]
    _, out, _ = here(validate.main, data, "--path", run / "checkpoint_best", code=0)
    figures = dict(line.split(maxsplit=1) for line in out.splitlines() if line.strip())
    assert (figures["accuracy"], figures["num_targets"]) == ("1.0000", str(len(rows)))
    if family == "glm":  # texts are asked for as of any model of the family; the samples are no prompts
        scored = ftk.load_generator(run, "cpu").score_candidates("is it [MASK] .", [["yes"], ["no"]])
        assert [[len(answer.token_logprobs) for answer in one] for one in scored] == [[2], [2]]
        *_, error = here(generate.main, data, "--path", run, "--gen-subset", "val", code=2)
        assert "whose samples are no prompts; give texts by --input" in error


@pytest.mark.parametrize(("family", "number"), [("glm", 4), ("gpt2", 0), ("t5", 0)])
def test_a_model_that_does_not_read_behind_the_gap_is_asked_by_a_pattern_that_ends_in_it(
    family, number, tmp_path, caplog, here, learn, bases
) -> None:
    caplog.set_level("INFO", "ftk")
    data, run = write_rows(tmp_path / "rows", train=boolq_rows(8), valid=boolq_rows(4)), tmp_path / "run"
    learn("cloze", data, bases(family), run, "--cloze", "boolq", "--max-update", 1)
    said = "boolq: `pattern` 0, since the model does not read the text that the usual pattern 4 has after the gap"
    assert (said in caplog.messages) == (number == 0)
    kept = yaml.safe_load((run / "checkpoint_last" / "config.yaml").read_text())["task"]["pattern"]
    assert kept == (None if number == 4 else number)
    learn("cloze", data, bases(family), run, "--cloze", "boolq", "--max-update", 2)
    assert settings_of(here, data, tmp_path / "results", run)["pattern"] == number


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, learn, bases) -> None:
    data = write_rows(tmp_path / "rows", train=copa_rows(12), valid=copa_rows(4))
    options = ["--cloze", "copa", "--choice-loss", "mix", "--dropout", 0.1, "--batch-size", 5]
    learn("cloze", data, bases("glm"), tmp_path / "whole", *options, "--max-update", 8)
    learn("cloze", data, bases("glm"), tmp_path / "parts", *options, "--max-update", 3)
    learn("cloze", data, bases("glm"), tmp_path / "parts", *options, "--max-update", 8, "--num-workers", 1)
    assert_same_weights(tmp_path / "parts" / "checkpoint_last", tmp_path / "whole" / "checkpoint_last")


def test_an_adapter_alone_keeps_its_task(tmp_path, bases, here, learn) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(16), valid=boolq_rows(8))
    base, run, alone = bases("glm"), tmp_path / "run", tmp_path / "alone"
    learn("cloze", data, base, run, "--cloze", "boolq", "--pattern", 2, "--adapter", "ia3", "--max-update", 2)
    here(checkpoint.main, "adapter", run, alone, code=0)
    assert str(data) not in (alone / FACTS).read_text()
    here(checkpoint.main, "merge", alone, tmp_path / "merged", "--base", base, code=0)
    found, on_cpu = [], ["--device", "cpu"]
    for path in ([run], [alone, "--base", base], [tmp_path / "merged"]):
        _, out, _ = here(validate.main, data, "--path", *path, *on_cpu, "--output-format", "json", code=0)
        found.append((json.loads(out)["loss"], settings_of(here, data, tmp_path / f"results-{len(found)}", *path)))
    for loss, settings in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert settings == found[0][1]
    # As from a program that says no task: that of the base.
    facts = json.loads((alone / FACTS).read_text())
    (alone / FACTS).write_text(json.dumps({key: facts[key] for key in facts if key != "config"}))
    here(validate.main, data, "--path", alone, "--base", base, *on_cpu, code=2)
    (alone / FACTS).write_text(json.dumps({**facts, "config": [1]}))
    *_, error = here(validate.main, data, "--path", alone, "--base", base, *on_cpu, code=2)
    assert "ftk_adapter.json" in error


@pytest.mark.parametrize("more", [[], ["--train-also", "*"]], ids=["frozen", "all"])
def test_prompt_tokens_are_learned_resumed_validated_and_evaluated(more, tmp_path, bases, here, learn) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(16), valid=boolq_rows(8))
    given = ["--cloze", "boolq", "--adapter", "p_tuning", "--num-prompt-tokens", 3, "--prefix-prompt", 2, *more]
    base, whole, parts = bases("glm"), tmp_path / "whole", tmp_path / "parts"
    for run, updates in ((whole, 4), (parts, 2), (parts, 4)):
        learn("cloze", data, base, run, *given, "--max-update", updates)
    assert_same_weights(parts, whole)
    tensors, before = load_model_tensors(whole), load_model_tensors(base)
    assert all(torch.equal(tensors[name], before[name]) for name in before) == (not more)
    _, out, _ = here(validate.main, data, "--path", whole, "--output-format", "json", code=0)
    valid = records_of(parts, "valid")[-1]
    assert json.loads(out)["loss"] == pytest.approx(valid["loss"], rel=1e-5)
    settings_of(here, data, tmp_path / "results", whole)
    results = [json.loads(line) for line in (tmp_path / "results" / "predictions.jsonl").read_text().splitlines()]
    # The loss of a question is that of its candidates' log-probabilities, read by the engine with the same prompt.
    losses = [
        torch.tensor([one["score"] for one in row["candidates"]]).log_softmax(0)[int(row["label"])] for row in results
    ]
    assert -float(sum(losses)) / len(losses) == pytest.approx(valid["loss"], rel=1e-4)
    *_, error = here(checkpoint.main, "adapter", whole, tmp_path / "alone", code=2)
    assert "has an adapter that is not written alone, p_tuning; give" in error
    taught = [*learning("cloze", base), *given, "--teacher", base, "--max-update", 1, "--save-dir", tmp_path / "taught"]
    *_, error = here(train.main, data, *taught, code=2)
    assert "--adapter p_tuning has prompt tokens, which a --teacher does not know" in error


def test_questions_are_shown_with_their_candidates(tmp_path, here, bases) -> None:
    data = write_rows(tmp_path / "rows", train=[BOOLQ])
    tokenizer = bases("glm") / "checkpoint_1"
    show = [data_command.main, "show", data, "--task", "cloze", "--tokenizer-folder", tokenizer, "--cloze", "boolq"]
    assert here(*show, code=0)[1].splitlines() == [
        f"question 0 of 1: {data}/train.jsonl:1",
        "  Based on the following passage is it red?[ ... ]. The sun is red.",
        "    ' No': no",
        "  * ' Yes': yes",
    ]
    for options, message in ((["--index", "1"], "has 1 questions, from 0 on"), (["--html", "x"], "draws no page")):
        assert message in here(*show, *options, code=2)[2]
    write_rows(data, train=[COPA])
    assert f"{data}/train.jsonl:1: field 'label' is 1; it must be true or false" in here(*show, code=2)[2]


def test_the_split_that_is_learned_from_is_that_of_the_run_whatever_its_name(tmp_path, learn, bases) -> None:
    data = write_rows(tmp_path / "rows", train_a=copa_rows(4), train=copa_rows(4))
    given = ["--cloze", "copa", "--train-subset", "train_a", "--valid-subset", "train_a,train", "--max-epoch", 1]
    learn("cloze", data, bases("glm"), tmp_path / "run", *given, "--batch-size", 4)
    updates = len(records_of(tmp_path / "run", "train"))  # each row is learned twice
    validated = [record["num_targets"] for record in records_of(tmp_path / "run", "valid")]
    assert (updates, validated) == (2, [4, 4])


def test_a_checkpoint_keeps_a_task_of_ones_own(tmp_path, here, learn, bases) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(4), valid=boolq_rows(4))
    file = tmp_path / "own.yaml"
    file.write_text("like: boolq\npatterns: {7: '{passage:shorten} So{ question}?{gap}.'}\n")
    learn("cloze", data, bases("glm"), tmp_path / "run", "--cloze", file, "--pattern", 7, "--max-update", 1)
    file.unlink()
    assert "accuracy" in here(validate.main, data, "--path", tmp_path / "run", code=0)[1]


def test_a_language_models_loss_learns_from_right_candidates_alone(tmp_path, learn, bases) -> None:
    data = write_rows(tmp_path / "rows", train=copa_rows(8), valid=copa_rows(4))
    options = ["--cloze", "copa", "--max-update", 2, "--criterion", "cross_entropy"]
    learn("cloze", data, bases("glm"), tmp_path / "run", *options)
    valid = records_of(tmp_path / "run", "valid")[0]
    answers = [row["choice1"] if row["label"] == 0 else row["choice2"] for row in copa_rows(4)]
    assert valid["num_targets"] == sum(len(answer.split()) + 1 for answer in answers)


@pytest.mark.parametrize("name", slow_but(["boolq"], ["boolq", "copa"]))
def test_ranks_find_what_one_process_finds(name, tmp_path, bases) -> None:
    rows = boolq_rows(26) if name == "boolq" else copa_rows(13)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows[:7])
    flags = [*learning("cloze", bases("glm")), "--cloze", name, "--max-epoch", 2, "--no-save"]
    layouts = PARALLEL | {"R2 rest": (2, "--batch-size 3 --update-freq 2")}
    assert_ranks_agree(data, tmp_path, flags, ("loss", "accuracy", "num_targets", "gnorm"), layouts, least=6)


@pytest.mark.slow
def test_ranks_train_the_same_prompt_tokens(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(24), valid=boolq_rows(6))
    given = [*learning("cloze", bases("glm")), "--cloze", "boolq", "--adapter", "p_tuning"]
    given += ["--dropout", 0, "--attention-dropout", 0, "--embedding-dropout", 0, "--max-update", 3]
    flags = shlex.join(map(str, given))
    run_records(
        data, tmp_path, [(one, PARALLEL[one][0], f"{flags} {PARALLEL[one][1]}") for one in ("one", "R2", "S2", "T2")]
    )
    expected = load_model_tensors(tmp_path / "one")
    for name in ("R2", "S2", "T2"):
        torch.testing.assert_close(load_model_tensors(tmp_path / name), expected, rtol=1e-3, atol=2e-5)
    for flags, message in (
        (["--pipeline-parallel-size", "2"], "use --data-parallel-shard-size"),
        (["--tensor-parallel-size", "2", "--sequence-parallel"], "p_tuning stand in whole sequences; leave it out"),
    ):
        done = run_jobs(run_all, 2, [[*map(str, [data, *given]), "--save-dir", str(tmp_path / "refused"), *flags]])
        assert done.returncode == 2
        assert message in done.stderr


REAL = {"boolq": ("BoolQ", 64, ["--seq-length", "96"]), "copa": ("COPA", 32, [])}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm", "gpt2"])
@pytest.mark.parametrize("name", REAL)
def test_rows_of_superglue_are_learned_by_heart(name, family, tmp_path, test_data, learn) -> None:
    folder, count, options = REAL[name]
    path = test_data / "superglue" / folder / "train.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is missing")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[:count]]
    words = sorted({word.strip(".,!?").lower() for row in rows for text in row.values() for word in str(text).split()})
    words = ["yes", "no", *(word for word in words if word.isascii() and word.isalpha())]
    base = make_model(tmp_path / "base", family, words, hidden_size=64, num_attention_heads=4)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows)
    more = ["--cloze", name, "--pattern", 0, "--max-epoch", 60, "--save-interval", 0, *options, "--lr", 2e-3]
    more += ["--validate-interval", 10, "--best-metric", "accuracy"]
    learn("cloze", data, base, tmp_path / "run", *more)
    assert max(record["accuracy"] for record in records_of(tmp_path / "run", "valid")) == 1.0
