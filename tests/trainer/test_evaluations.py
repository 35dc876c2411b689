"""Evaluations in validation: figures that rank checkpoints and end runs, and leave the training as it was."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from ftk.model_parallel.compile import is_compiled
from ftk.trainer.evaluations import EvaluateWith
from ftk_cli.evaluate import main as evaluate_command
from ftk_cli.preprocess import main as preprocess_command
from ftk_cli.train import main as train_command
from tests.byte_tokenizer import CHATML, byte_tokenizer
from tests.records import assert_same_weights, records_of
from tests.tasks.cloze.made import boolq_rows, make_model, write_rows

MULTIRC = [
    {
        "idx": number,
        "passage": {
            "text": "the red cat saw the round sun .",
            "questions": [
                {
                    "idx": place,
                    "question": "what is red ?",
                    "answers": [{"idx": n, "text": text, "label": int(n == place)} for n, text in enumerate(words)],
                }
                for place in range(2)
            ],
        },
    }
    for number, words in enumerate((("cat", "sun"), ("sky", "car")))
]
LEARN = "--lr 3e-3 --lr-scheduler constant --device cpu --log-interval 1 --seq-length 64 --dropout 0.1 --pattern 0"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("base") / "glm", "glm", num_layers=1)


def train(data: Path, base: Path, run: Path, *options: object) -> int:
    given = [data, "--task", "cloze", "--finetune-from", base, *LEARN.split(), "--save-dir", run, *options]
    return train_command([*map(str, given)])


def test_a_run_is_ranked_and_ended_by_a_metric_and_learns_the_same_with_it(tmp_path, base, capsys) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(8), val=boolq_rows(9))
    options = ["--cloze", "boolq", "--batch-size", 4, "--max-update", 12, "--validate-interval-updates", 2]
    options += ["--keep-last", 0, "--save-interval-updates", 2]
    ranked = ["--best-metric", "boolq_accuracy", "--patience", 2]
    assert train(data, base, tmp_path / "plain", *options) == 0
    assert train(data, base, tmp_path / "run", *options, "--evaluate-with", "boolq", *ranked) == 0
    plain, found = (records_of(tmp_path / name, "train") for name in ("plain", "run"))
    assert [record["loss"] for record in found] == [record["loss"] for record in plain[: len(found)]]
    valid = records_of(tmp_path / "run", "valid")
    accuracies = [record["boolq_accuracy"] for record in valid]
    assert accuracies == [pytest.approx(100 * record["accuracy"]) for record in valid]
    best = accuracies.index(max(accuracies))
    assert (tmp_path / "run" / "checkpoint_best").resolve().name == f"checkpoint_{valid[best]['num_updates']}"
    last, since_best = valid[-1]["num_updates"], len(valid) - 1 - best
    assert since_best == 2 if last < 12 else since_best <= 2
    assert_same_weights(tmp_path / "run" / f"checkpoint_{last}", tmp_path / "plain" / f"checkpoint_{last}")
    assert f" | boolq_accuracy {accuracies[0]:.4f}" in capsys.readouterr().out
    asked = ["--path", str(tmp_path / "run" / "checkpoint_best"), "--evaluation", "boolq", "--data"]
    assert evaluate_command([*asked, str(data / "val.jsonl"), "--device", "cpu", "--bootstrap", "0"]) == 0
    assert f"{max(accuracies):.2f} %" in capsys.readouterr().out


def test_a_metric_of_groups_of_rows_and_files_of_other_evaluations_in_a_run_in_bf16(tmp_path, base) -> None:
    data = write_rows(tmp_path / "rows", train=MULTIRC, valid=MULTIRC)
    (tmp_path / "text.txt").write_text("the red cat saw the round sun and the blue sky\n")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"source": "the red cat", "target": "saw the sun"}))
    options = ["--cloze", "multirc", "--max-update", 1, "--precision", "bf16", "--evaluate-with"]
    options += ["multirc,perplexity", "generation scoring=[token_f1]", "--evaluation-data"]
    files = [f"perplexity={tmp_path}/text.txt", f"generation={tmp_path}/rows.jsonl"]
    assert train(data, base, tmp_path / "run", *options, *files) == 0
    (record,) = records_of(tmp_path / "run", "valid")
    assert 0.0 <= record["multirc_em"] <= 100.0
    assert 0.0 <= record["multirc_f1a"] <= 100.0
    assert record["perplexity_perplexity"] > 1.0
    assert 0.0 <= record["generation_token_f1"] <= 100.0


def test_evaluations_compile_nothing_in_a_compiled_run(tmp_path, base, monkeypatch) -> None:
    programs, before, after, evaluate = [], [], [], EvaluateWith.after_validation

    def backend(graph, inputs):
        programs.append(graph)
        return graph

    def counted(hook, *given):
        before.append(len(programs))
        evaluate(hook, *given)
        after.append(len(programs))
        assert is_compiled(hook._module)

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(EvaluateWith, "after_validation", counted)
    data = write_rows(tmp_path / "rows", train=boolq_rows(4), valid=boolq_rows(4))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"source": "the red cat", "target": "saw the sun"}))
    options = ["--cloze", "boolq", "--max-update", 1, "--compile", "block", "--evaluate-with"]
    options += ["boolq", "generation scoring=[token_f1]", "--evaluation-data", f"generation={tmp_path}/rows.jsonl"]
    assert train(data, base, tmp_path / "run", *options) == 0
    assert before == after
    assert len(before) == 1
    assert before[0] > 0


def test_a_run_that_continues_texts_is_asked_in_conversations_as_afterwards(tmp_path, capsys) -> None:
    byte_tokenizer(tmp_path / "tokenizer", chat_template=CHATML)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "assistant\nb b b b b b\n" * 150}))
    talk = [{"role": "user", "content": "which letter ?"}, {"role": "assistant", "content": "b b b b"}]
    (tmp_path / "talks.jsonl").write_text(json.dumps({"messages": talk}))
    texts = [
        "--trainpref",
        tmp_path / "text.jsonl",
        "--validpref",
        tmp_path / "text.jsonl",
        "--destdir",
        tmp_path / "data",
    ]
    preprocess_command([*map(str, [*texts, "--tokenizer", "hf", "--tokenizer-path", tmp_path / "tokenizer"])])
    evaluation, talks = "generation chat=true scoring=[token_f1]", tmp_path / "talks.jsonl"
    given = [tmp_path / "data", "--arch", "gpt2_tiny", "--num-layers", 1, "--max-update", 30, "--seq-length", 64]
    given += ["--batch-size", 4, *LEARN.split()[:6], "--save-dir", tmp_path / "run"]
    assert train_command([*map(str, [*given, "--evaluate-with", evaluation, "--evaluation-data", talks])]) == 0
    found = records_of(tmp_path / "run", "valid")[-1]["generation_token_f1"]
    asked = ["--path", tmp_path / "run", "--evaluation", evaluation, "--data", talks, "--device", "cpu"]
    assert evaluate_command([*map(str, asked)]) == 0
    assert found > 0
    assert f" {found:.2f} % " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--evaluate-with bolq", "--evaluate-with is 'bolq'; there are: "),
        ("--evaluate-with boolq,boolq", "--evaluate-with names boolq more than once"),
        ("--evaluate-with boolq perplexity", "the evaluation perplexity has more than one file"),
        ("--evaluate-with boolq --evaluation-data nowhere.jsonl", "-data nowhere.jsonl: No such file or directory"),
        ("--evaluate-with copa", "valid.jsonl:1: field 'question' is 'round cat red'; it must be one of 'cause'"),
        ("--evaluate-with boolq --best-metric boolq_em", "is not one of the validation's figures: "),
        ("--evaluate-with boolq --valid-subset none", "--evaluate-with has no effect with --valid-subset none;"),
        ("--evaluation-limit 3", "--evaluation-limit has no effect without --evaluate-with"),
    ],
)
def test_what_cannot_be_evaluated_is_said_before_training(options, message, tmp_path, base, capsys) -> None:
    data = write_rows(tmp_path / "rows", train=boolq_rows(4), valid=boolq_rows(4))
    given = options.split()
    if "more than one file" in message:
        given += ["--evaluation-data", "perplexity=a.txt", "perplexity=b.txt"]
    assert train(data, base, tmp_path / "run", "--cloze", "boolq", "--max-update", 1, *given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
