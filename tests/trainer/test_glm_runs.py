"""Runs of the real task by the real command: stopped, and continued; signals; a full disk."""

from __future__ import annotations

import math
import os
import shlex
import signal

import pytest
import torch

from ftk.checkpoint import verify
from ftk.config.build import build
from ftk.trainer import Trainer, build_run
from ftk.trainer.config import TrainConfig
from tests.processes import small_files_only, start_command, wait_until
from tests.tiers import slow_but
from tests.trainer.toy import assert_same


def glm_trainer(data_bin, save_dir, *, signal_at=None, world=None, **options):
    """A Trainer of glm_tiny with dropout; with `signal_at` a SIGTERM comes in that training step."""
    tree = {
        "common": {"device": "cpu", "seed": 3},
        "logging": {"log_format": "json", "log_interval": 2},
        "dataset": {"data": str(data_bin)},
        "task": {"seq_length": 48, "bert_prob": 0.4, "gap_sentence_prob": 0.3},
        "model": {"arch": "glm_tiny", "dropout": 0.1, "attention_dropout": 0.1},
        "optimizer": {"lr": 1e-3},
        "dataloader": {"max_tokens": 200, "max_valid_samples": 6},
        "training": {"max_update": 8, "update_freq": 2, "validate_interval_updates": 3},
        "checkpoint": {"save_dir": str(save_dir)},
    }
    for key, value in options.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    trainer = Trainer(build_run(build(TrainConfig, tree), world=world))
    if signal_at is not None:
        loss_of, steps = trainer.run.update.criterion.loss, iter(range(1, 10**6))

        def loss(head, hidden, batch):
            if torch.is_grad_enabled() and next(steps) == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return loss_of(head, hidden, batch)

        trainer.run.update.criterion.loss = loss
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, data_bin):
    trainer = glm_trainer(data_bin, tmp_path_factory.mktemp("glm") / "run")
    trainer.train()
    return trainer


@pytest.mark.parametrize(("signal_at", "num_workers"), [(3, 2), (6, 0), (9, 1)])
def test_a_glm_run_resumed_in_mid_epoch_ends_with_the_same_bits(
    tmp_path, data_bin, uninterrupted, signal_at, num_workers
):
    stopped = glm_trainer(data_bin, tmp_path / "run", signal_at=signal_at)
    assert stopped.train().signal == "SIGTERM"
    assert stopped.state.iterator["samples_consumed"] > 0
    resumed = glm_trainer(data_bin, tmp_path / "run", dataloader__num_workers=num_workers)
    assert resumed.state.num_updates == (signal_at + 1) // 2
    resumed.train()
    assert_same(resumed, uninterrupted)
    assert resumed.state.best == uninterrupted.state.best
    assert resumed.state.iterator == uninterrupted.state.iterator


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_glm_learns_more_than_a_guess(tmp_path, data_bin, precision):
    trainer = glm_trainer(
        data_bin,
        tmp_path / "run",
        training__max_update=40,
        optimizer__lr=5e-3,
        checkpoint__save=False,
        training__validate_interval_updates=20,
        training__precision=precision,
    )
    trainer.train()
    guess = math.log(trainer.run.config.model.config.vocab_size)
    assert trainer.state.best.value < guess - 1.0


FLAGS = shlex.split(
    "--arch glm_tiny --seq-length 48 --batch-size 2 --lr 1e-3 --log-interval 5 --log-format json --max-valid-samples 4 "
    "--device cpu"
)


@pytest.mark.parametrize("signum", slow_but([signal.SIGINT], [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]))
def test_a_signal_to_the_whole_process_group_leaves_the_workers_alive(tmp_path, data_bin, signum):
    flags = ["--max-update", "100000", "--save-interval-updates", "2", "--num-workers", "2"]
    arguments = (data_bin, *FLAGS, "--save-dir", tmp_path / "run", *flags)
    process = start_command("ftk-train", *arguments, errors=tmp_path / "errors", before=os.setsid)
    wait_until(lambda: newest_update(tmp_path / "run") >= 2, process)
    os.killpg(process.pid, signum)
    process.join(300)
    errors = (tmp_path / "errors").read_text()
    assert process.exitcode == (1 if signum == signal.SIGINT else 0), errors
    assert f"stopped: {signum.name} was received" in errors
    assert "Traceback" not in errors
    assert "died" not in errors
    assert verify(tmp_path / "run" / "checkpoint_last") == []


def newest_update(folder):
    names = [path.name for path in folder.glob("checkpoint_*") if path.name[11:].isdigit()]
    return max((int(name[11:]) for name in names), default=0)


def test_a_full_disk_is_one_line_and_the_old_checkpoint_stays(tmp_path, data_bin, command):
    arguments = ["ftk-train", data_bin, *FLAGS, "--save-dir", tmp_path / "run", "--max-update"]
    command(*arguments, 3, code=0)
    second = command(*arguments, 6, before=small_files_only, code=1)
    assert "Traceback" not in second.stderr
    assert "checkpoint_6" in second.stderr.splitlines()[-1]
    assert verify(tmp_path / "run" / "checkpoint_3") == []
    assert (tmp_path / "run" / "checkpoint_last").resolve().name == "checkpoint_3"
    assert not list((tmp_path / "run").glob("*.tmp-*"))


def test_padded_batches_train_the_same(data_bin, tmp_path):
    trained, lengths = [], []
    for multiple in (1, 64):
        trainer = glm_trainer(
            data_bin, tmp_path / str(multiple), dataloader__pad_to_multiple=multiple, training__max_update=2,
            model__dropout=0.0, model__attention_dropout=0.0, model__embedding_dropout=0.0,
        )  # fmt: skip
        iterator = trainer.run.train_iterator
        lengths.append({batch.inputs["tokens"].size(1) for batch in iterator.batches()})
        iterator.epoch = 1
        trainer.train()
        trained.append(dict(trainer.run.model.state_dict()))
    assert lengths[1] == {64} != lengths[0]
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-5)
