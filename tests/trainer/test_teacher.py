"""Runs with a teacher: what is learned and saved, that they resume bit for bit, and which teachers are refused."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from ftk.checkpoint import load_model_tensors, read_config, resolve_model
from ftk.errors import UserError
from ftk.models import build_model
from ftk.trainer.teacher import checkpoint_of
from ftk_cli.train import main as train
from ftk_cli.validate import main as validate
from tests.records import records_of
from tests.small_run import SHAPE, save_model
from tests.trainer.test_glm_runs import glm_trainer
from tests.trainer.toy import assert_same

DRY = ["--arch", "glm_tiny", "--seq-length", "48", "--max-update", "1", "--dry-run"]
SMALL = {"model__num_layers": 1, "training__max_update": 4, "training__validate_interval_updates": 2}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, data_bin):
    """A run, of more layers than the students have, with steep probabilities."""
    folder = tmp_path_factory.mktemp("teacher") / "run"
    glm_trainer(data_bin, folder, model__num_layers=2, training__max_update=4, optimizer__lr=1e-2).train()
    return folder


def student(data_bin, save_dir, teacher, **options):
    return glm_trainer(data_bin, save_dir, **{"distillation__teacher": str(teacher), **SMALL, **options})


def test_a_stopped_run_goes_on_with_the_same_bits_and_needs_no_teacher_afterwards(tmp_path, data_bin, teacher, capsys):
    options = {"distillation__teacher_hidden_weight": 0.25, "distillation__teacher_layers": ["0=1"]}
    narrow = {"model__hidden_size": 32, "model__num_attention_heads": 2}  # than the teacher: its states are projected
    options |= narrow
    whole = student(data_bin, tmp_path / "whole", teacher, **options)
    whole.train()
    assert student(data_bin, tmp_path / "run", teacher, signal_at=3, **options).train().signal == "SIGTERM"
    resumed = student(data_bin, tmp_path / "run", teacher, **options)
    assert resumed.state.num_updates == 2
    resumed.train()
    assert_same(resumed, whole)
    assert read_config(tmp_path / "run")["distillation"]["teacher"] == str(resolve_model(teacher))
    for record in (*records_of(tmp_path / "run", "train"), *records_of(tmp_path / "run", "valid")):
        assert record["loss"] == pytest.approx(
            0.5 * record["task_loss"] + 0.5 * 4 * record["teacher_kl"] + 0.25 * record["teacher_hidden"]
        )
        assert record["ppl"] == pytest.approx(math.exp(record["task_loss"]))
        assert record["nll_loss"] == record["task_loss"]
    plain = glm_trainer(data_bin, tmp_path / "plain", **SMALL, **narrow)
    assert load_model_tensors(tmp_path / "run").keys() == plain.run.model.state_dict().keys()
    plain.run.checkpoints.release()
    capsys.readouterr()
    assert validate([str(data_bin), "--path", str(tmp_path / "run"), "--max-valid-samples", "6"]) == 0
    figures = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip())
    best = resumed.state.best.num_updates
    (validated,) = [one for one in records_of(tmp_path / "run", "valid") if one["num_updates"] == best]
    assert float(figures["loss"]) == pytest.approx(validated["task_loss"], abs=1e-3)


def test_a_run_that_is_named_again_means_the_checkpoint_that_it_meant(tmp_path, teacher):
    run = shutil.copytree(teacher, tmp_path / "run", symlinks=True)
    first, newer = resolve_model(run), run / "checkpoint_9"
    shutil.copytree(first, newer)
    link, best = tmp_path / "link", run / "checkpoint_best"
    link.symlink_to(run)
    best.unlink()
    best.symlink_to(newer.name)
    for given in (run, link, best):
        assert checkpoint_of("teacher", str(given)) == str(newer)
        assert checkpoint_of("teacher", str(given), str(first)) == str(first)
    assert checkpoint_of("teacher", str(newer), str(first)) == str(newer)


def test_a_student_comes_nearer_to_its_teacher_alone(tmp_path, data_bin, teacher):
    options = {"distillation__teacher_weight": 1.0, "optimizer__lr": 5e-3, "training__max_update": 16}
    options |= {"distillation__teacher_hidden_weight": 1.0, "distillation__teacher_hidden_loss": "cosine"}
    trainer = student(data_bin, tmp_path / "run", teacher, checkpoint__save=False, **options)
    trainer.train()
    run = trainer.run
    assert run.update.criterion.num_tokens == run.task.tokenizer.vocab_size < run.config.model.config.vocab_size
    for figure in ("teacher_kl", "teacher_hidden"):
        found = [record[figure] for record in records_of(tmp_path / "run", "valid")]
        assert found[-1] < 0.8 * found[0], figure


def save(folder, name, tokenizer, **shape):
    torch.manual_seed(0)
    save_model(folder / "checkpoint_1", build_model(name, **shape), tokenizer)
    return folder


def test_a_teacher_that_reads_other_batches_is_refused(tmp_path, data_bin, place, teacher, capsys):
    shape = {**SHAPE, "vocab_size": 640}
    tokenizer = data_bin / "tokenizer"
    refused = {
        save(tmp_path / "gpt2", "gpt2", tokenizer, **shape): r"is of the family gpt2, which reads tokens, .* of the "
        r"task causal_lm, but the batches are for glm, which reads tokens, .* of the task glm_blank; choose",
        save(
            tmp_path / "short", "glm", tokenizer, **{**shape, "max_positions": 32}
        ): r"short\S* does not fit the task: "
        "`seq_length` 48 is beyond the model's 32 positions",
        save(tmp_path / "plain", "glm", tokenizer, **shape, block_positions=False): r"plain\S* was made with "
        "`block_positions` False, but the batches are for True",
        place / "run": r"run\S* has another tokenizer \(sentencepiece, .* tokens, fingerprint .*\) than the run",
        tmp_path / "nowhere": "no such folder",
    }
    for folder, message in refused.items():
        with pytest.raises(UserError, match=message):
            student(data_bin, tmp_path / "run", folder)
    assert not (tmp_path / "run").exists()
    given = [str(data_bin), *DRY, "--device", "cpu", "--teacher", str(teacher)]
    assert train(given) == 0
    assert "optimizer state; without the teacher)" in capsys.readouterr().out
    hidden = {"distillation__teacher_hidden_weight": 1.0}
    with pytest.raises(UserError, match="0=2: the teacher has layers 0 to 1, no layer 2"):
        student(data_bin, tmp_path / "run", teacher, **hidden, distillation__teacher_layers=["0=2"])
    with pytest.raises(UserError, match="reads what layers give; use `compile` block or none"):
        student(data_bin, tmp_path / "run", teacher, **hidden, engine__compile="model")
    with pytest.raises(UserError, match="`teacher` needs the whole model on each process"):
        check(data_bin, tmp_path, teacher)


def check(data_bin, tmp_path, teacher):
    from ftk.config import compose
    from ftk.trainer.config import TrainConfig
    from ftk.trainer.parallel_check import check_parallel
    from ftk.trainer.run import build_task

    given = [str(data_bin), *DRY, "--tensor-parallel-size", "2", "--teacher", str(teacher)]
    check_parallel(*build_task(compose(TrainConfig, "ftk-train", "", given)))
