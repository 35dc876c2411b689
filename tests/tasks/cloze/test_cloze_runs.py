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
from ftk_cli.checkpoint import main as checkpoint_command
from ftk_cli.data import main as data_command
from ftk_cli.evaluate import main as evaluate_command
from ftk_cli.generate import main as generate_command
from ftk_cli.train import main as train_command
from ftk_cli.validate import main as validate_command
from tests.distributed import run_jobs
from tests.records import assert_same_weights, records_of
from tests.tasks.cloze.made import BOOLQ, COPA, FAMILIES, boolq_rows, copa_rows, make_model, write_rows
from tests.tiers import slow_but
from tests.trainer.parallel_jobs import picked, run_all, run_records

LEARN = ["--lr", 3e-3, "--lr-scheduler", "constant", "--batch-size", 8, "--device", "cpu", "--clip-norm", 1]
LEARN += ["--log-interval", 1, "--seq-length", 64]


def train(data: Path, base: Path, run: Path, *options: object) -> list[dict[str, Any]]:
    """The records of a run."""
    given = ["--task", "cloze", "--finetune-from", base, *LEARN, "--save-dir", run, *options]
    assert train_command([*map(str, (data, *given))]) == 0
    return records_of(run)


@pytest.mark.parametrize(
    ("name", "family"),
    slow_but([("boolq", "glm")], [(n, f) for n in ("boolq", "copa") for f in FAMILIES]),
)
def test_rows_are_learned_by_heart_and_validated(name, family, tmp_path, capsys, bases) -> None:
    rows = boolq_rows(16) if name == "boolq" else copa_rows(8)
    data = write_rows(tmp_path / "rows", train=rows, val=rows)
    run = tmp_path / "run"
    rarely = ["--validate-interval", 0, "--validate-interval-updates", 40, "--save-interval", 0]
    given = ["--cloze", name, "--pattern", 0, "--max-update", 120, *rarely]
    records = train(data, bases(family), run, *given, "--best-metric", "accuracy")
    valid = [record for record in records if "valid_seconds" in record]
    assert max(record["accuracy"] for record in valid) == 1.0
    assert valid[-1]["num_targets"] == len(rows)
    assert "ppl" not in valid[-1]
    capsys.readouterr()
    assert validate_command([str(data), "--path", str(run / "checkpoint_best")]) == 0
    figures = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip())
    assert (figures["accuracy"], figures["num_targets"]) == ("1.0000", str(len(rows)))
    if family == "glm":  # texts are asked for as of any model of the family; the samples are no prompts
        scored = ftk.load_generator(run, "cpu").score_candidates("is it [MASK] .", [["yes"], ["no"]])
        assert [[len(answer.token_logprobs) for answer in one] for one in scored] == [[2], [2]]
        assert generate_command([str(data), "--path", str(run), "--gen-subset", "val"]) == 2
        assert "whose samples are no prompts; give texts by --input" in capsys.readouterr().err


@pytest.mark.parametrize(("family", "number"), [("glm", 4), ("gpt2", 0), ("t5", 0)])
def test_a_model_that_does_not_read_behind_the_gap_is_asked_by_a_pattern_that_ends_in_it(
    family, number, tmp_path, caplog, bases
) -> None:
    caplog.set_level("INFO", "ftk")
    data, run = write_rows(tmp_path / "rows", train=boolq_rows(8), valid=boolq_rows(4)), tmp_path / "run"
    train(data, bases(family), run, "--cloze", "boolq", "--max-update", 1)
    said = "boolq: `pattern` 0, since the model does not read the text that the usual pattern 4 has after the gap"
    assert (said in caplog.messages) == (number == 0)
    kept = yaml.safe_load((run / "checkpoint_last" / "config.yaml").read_text())["task"]["pattern"]
    assert kept == (None if number == 4 else number)
    train(data, bases(family), run, "--cloze", "boolq", "--max-update", 2)
    asked = ["--evaluation", "boolq", "--data", str(data / "valid.jsonl"), "--bootstrap", "0"]
    assert evaluate_command([*asked, "--path", str(run), "--device", "cpu", "--output", str(tmp_path / "results")]) == 0
    settings = json.loads((tmp_path / "results" / "results.json").read_text())["results"][0]["settings"]
    assert settings["pattern"] == number


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=copa_rows(12), valid=copa_rows(4))
    options = ["--cloze", "copa", "--choice-loss", "mix", "--dropout", 0.1, "--batch-size", 5]
    train(data, bases("glm"), tmp_path / "whole", *options, "--max-update", 8)
    train(data, bases("glm"), tmp_path / "parts", *options, "--max-update", 3)
    train(data, bases("glm"), tmp_path / "parts", *options, "--max-update", 8, "--num-workers", 1)
    assert_same_weights(tmp_path / "parts" / "checkpoint_last", tmp_path / "whole" / "checkpoint_last")


def test_an_adapter_alone_keeps_its_task(tmp_path, bases, capsys) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(16), valid=boolq_rows(8))
    base, run, alone = bases("glm"), tmp_path / "run", tmp_path / "alone"
    train(data, base, run, "--cloze", "boolq", "--pattern", 2, "--adapter", "ia3", "--max-update", 2)
    assert checkpoint_command(["adapter", str(run), str(alone)]) == 0
    assert str(data) not in (alone / FACTS).read_text()
    assert checkpoint_command(["merge", str(alone), str(tmp_path / "merged"), "--base", str(base)]) == 0
    found, asked = [], ["--evaluation", "boolq", "--data", str(data / "valid.jsonl"), "--bootstrap", "0"]
    for path in ([run], [alone, "--base", base], [tmp_path / "merged"]):
        given = ["--path", *map(str, path), "--device", "cpu"]
        results = tmp_path / f"results-{len(found)}"
        capsys.readouterr()
        assert validate_command([str(data), *given, "--output-format", "json"]) == 0
        loss = json.loads(capsys.readouterr().out)["loss"]
        assert evaluate_command([*given, *asked, "--output", str(results)]) == 0
        settings = json.loads((results / "results.json").read_text())["results"][0]["settings"]
        found.append((loss, settings))
    for loss, settings in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-5)
        assert settings == found[0][1]
    # As from a program that says no task: that of the base.
    facts = json.loads((alone / FACTS).read_text())
    (alone / FACTS).write_text(json.dumps({key: facts[key] for key in facts if key != "config"}))
    assert validate_command([str(data), "--path", str(alone), "--base", str(base), "--device", "cpu"]) == 2
    (alone / FACTS).write_text(json.dumps({**facts, "config": [1]}))
    assert validate_command([str(data), "--path", str(alone), "--base", str(base), "--device", "cpu"]) == 2
    assert "ftk_adapter.json" in capsys.readouterr().err


@pytest.mark.parametrize("more", [[], ["--train-also", "*"]], ids=["frozen", "all"])
def test_prompt_tokens_are_learned_resumed_validated_and_evaluated(more, tmp_path, bases, capsys) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(16), valid=boolq_rows(8))
    given = ["--cloze", "boolq", "--adapter", "p_tuning", "--num-prompt-tokens", 3, "--prefix-prompt", 2, *more]
    base = bases("glm")
    train(data, base, tmp_path / "whole", *given, "--max-update", 4)
    train(data, base, tmp_path / "parts", *given, "--max-update", 2)
    records = train(data, base, tmp_path / "parts", *given, "--max-update", 4)
    tensors, again = (load_model_tensors(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(tensors[name], again[name]) for name in tensors)
    before = load_model_tensors(base)
    assert all(torch.equal(tensors[name], before[name]) for name in before) == (not more)
    capsys.readouterr()
    assert validate_command([str(data), "--path", str(tmp_path / "whole"), "--output-format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    valid = [record for record in records if "valid_seconds" in record][-1]
    assert found["loss"] == pytest.approx(valid["loss"], rel=1e-5)
    path = ["--path", str(tmp_path / "whole"), "--device", "cpu"]
    asked = ["--evaluation", "boolq", "--data", str(data / "valid.jsonl"), "--output", str(tmp_path / "results")]
    assert evaluate_command([*path, *asked]) == 0
    results = [json.loads(line) for line in (tmp_path / "results" / "predictions.jsonl").read_text().splitlines()]
    # The loss of a question is that of its candidates' log-probabilities, read by the engine with the same prompt.
    losses = [
        torch.tensor([one["score"] for one in row["candidates"]]).log_softmax(0)[int(row["label"])] for row in results
    ]
    assert -float(sum(losses)) / len(losses) == pytest.approx(valid["loss"], rel=1e-4)
    assert checkpoint_command(["adapter", str(tmp_path / "whole"), str(tmp_path / "alone")]) == 2
    assert "has an adapter that is not written alone, p_tuning; give" in capsys.readouterr().err
    taught = ["--task", "cloze", "--finetune-from", base, *LEARN, *given, "--teacher", base, "--max-update", 1]
    assert train_command([*map(str, (data, *taught)), "--save-dir", str(tmp_path / "taught")]) == 2
    assert "--adapter p_tuning has prompt tokens, which a --teacher does not know" in capsys.readouterr().err


def test_questions_are_shown_with_their_candidates(tmp_path, capsys, bases) -> None:
    data = write_rows(tmp_path / "rows", train=[BOOLQ])
    tokenizer = bases("glm") / "checkpoint_1"
    show = ["show", str(data), "--task", "cloze", "--tokenizer-folder", str(tokenizer), "--cloze", "boolq"]
    assert data_command(show) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"question 0 of 1: {data}/train.jsonl:1",
        "  Based on the following passage is it red?[ ... ]. The sun is red.",
        "    ' No': no",
        "  * ' Yes': yes",
    ]
    for options, message in ((["--index", "1"], "has 1 questions, from 0 on"), (["--html", "x"], "draws no page")):
        assert data_command([*show, *options]) == 2
        assert message in capsys.readouterr().err
    write_rows(data, train=[COPA])
    assert data_command(show) == 2
    assert f"{data}/train.jsonl:1: field 'label' is 1; it must be true or false" in capsys.readouterr().err


def test_the_split_that_is_learned_from_is_that_of_the_run_whatever_its_name(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train_a=copa_rows(4), train=copa_rows(4))
    given = ["--cloze", "copa", "--train-subset", "train_a", "--valid-subset", "train_a,train", "--max-epoch", 1]
    records = train(data, bases("glm"), tmp_path / "run", *given, "--batch-size", 4)
    updates = sum(record["event"] == "train" for record in records)  # each row is learned twice
    validated = [record["num_targets"] for record in records if "valid_seconds" in record]
    assert (updates, validated) == (2, [4, 4])


def test_a_checkpoint_keeps_a_task_of_ones_own(tmp_path, capsys, bases) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(4), valid=boolq_rows(4))
    file = tmp_path / "own.yaml"
    file.write_text("like: boolq\npatterns: {7: '{passage:shorten} So{ question}?{gap}.'}\n")
    train(data, bases("glm"), tmp_path / "run", "--cloze", file, "--pattern", 7, "--max-update", 1)
    file.unlink()
    capsys.readouterr()
    assert validate_command([str(data), "--path", str(tmp_path / "run")]) == 0
    assert "accuracy" in capsys.readouterr().out


def test_a_language_models_loss_learns_from_right_candidates_alone(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=copa_rows(8), valid=copa_rows(4))
    options = ["--cloze", "copa", "--max-update", 2]
    records = train(data, bases("glm"), tmp_path / "run", *options, "--criterion", "cross_entropy")
    (valid, *_) = [record for record in records if "valid_seconds" in record]
    answers = [row["choice1"] if row["label"] == 0 else row["choice2"] for row in copa_rows(4)]
    assert valid["num_targets"] == sum(len(answer.split()) + 1 for answer in answers)


PARALLEL = {
    "one": (1, "--batch-size 6 --update-freq 2"),
    "R2": (2, "--batch-size 6"),
    "R2 rest": (2, "--batch-size 3 --update-freq 2"),
    "T2": (2, "--batch-size 6 --update-freq 2 --tensor-parallel-size 2"),
    "P2": (2, "--batch-size 6 --update-freq 2 --pipeline-parallel-size 2"),
    "S2": (2, "--batch-size 6 --data-parallel-shard-size 2"),
}


@pytest.mark.parametrize("name", slow_but(["boolq"], ["boolq", "copa"]))
def test_ranks_find_what_one_process_finds(name, tmp_path, bases) -> None:
    rows = boolq_rows(26) if name == "boolq" else copa_rows(13)
    data = write_rows(tmp_path / "rows", train=rows, valid=rows[:7])
    given = ["--task", "cloze", "--cloze", name, "--finetune-from", bases("glm"), *LEARN, "--log-format", "json"]
    given += ["--max-epoch", 2, "--no-save"]
    flags = shlex.join(map(str, given))
    records, _ = run_records(data, tmp_path, [(one, size, f"{flags} {own}") for one, (size, own) in PARALLEL.items()])
    found = {one: picked(own, ("loss", "accuracy", "num_targets", "gnorm")) for one, own in records.items()}
    assert len(found["one"]) > 6
    for other in PARALLEL:
        assert len(found[other]) == len(found["one"])
        for ours, theirs in zip(found[other], found["one"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), other


@pytest.mark.slow
def test_ranks_train_the_same_prompt_tokens(tmp_path, bases) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(24), valid=boolq_rows(6))
    given = ["--task", "cloze", "--cloze", "boolq", "--adapter", "p_tuning", "--finetune-from", bases("glm"), *LEARN]
    given += ["--dropout", 0, "--attention-dropout", 0, "--embedding-dropout", 0, "--max-update", 3]
    flags = shlex.join(map(str, given))
    run_records(
        data, tmp_path, [(one, PARALLEL[one][0], f"{flags} {PARALLEL[one][1]}") for one in ("one", "R2", "S2", "T2")]
    )
    expected = load_model_tensors(tmp_path / "one")
    for name in ("R2", "S2", "T2"):
        found = load_model_tensors(tmp_path / name)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-3, atol=2e-5)
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
def test_rows_of_superglue_are_learned_by_heart(name, family, tmp_path, test_data) -> None:
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
    records = train(data, base, tmp_path / "run", *more)
    valid = [record for record in records if "valid_seconds" in record]
    assert max(record["accuracy"] for record in valid) == 1.0
