"""Initial values are drawn only where no checkpoint overwrites them."""

from __future__ import annotations

import json
import shlex

import pytest

import ftk.trainer.run as run_module
from ftk.errors import UserError
from tests.distributed import run_jobs
from tests.trainer.parallel_jobs import run_all
from tests.trainer.toy import toy_trainer

STEPS = (
    "--lr-scheduler constant --arch glm_tiny --num-layers 2 --device cpu --lr 1e-3 --warmup-updates 3 --seq-length 48 "
    "--batch-size 2 --log-interval 1 --log-format json --valid-subset none --data-parallel-shard-size 2"
)


@pytest.fixture
def filled(monkeypatch):
    """What `spread` was told in each run."""
    told = []
    spread = run_module.spread

    def noting(*arguments, fill):
        told.append(fill)
        return spread(*arguments, fill=fill)

    monkeypatch.setattr(run_module, "spread", noting)
    return told


def test_a_run_that_continues_needs_no_initial_values(tmp_path, filled):
    toy_trainer(tmp_path, training__max_update=2).train()
    toy_trainer(tmp_path, training__max_update=3).train()
    last = str(tmp_path / "run" / "checkpoint_last")
    toy_trainer(tmp_path, save_dir="restored", checkpoint__restore_from=last).train()
    toy_trainer(tmp_path, save_dir="tuned", checkpoint__finetune_from=last).train()  # may leave out some
    assert filled == [True, False, False, True]


def test_a_run_that_cannot_be_built_leaves_its_folder_to_others(tmp_path, monkeypatch):
    toy_trainer(tmp_path, training__max_update=2).train()

    def refuse(*arguments, fill):
        raise UserError("no such model")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "spread", refuse)
        with pytest.raises(UserError, match="no such model"):
            toy_trainer(tmp_path, training__max_update=3)
    assert toy_trainer(tmp_path, training__max_update=3).train().num_updates == 3


def test_shares_that_only_a_checkpoint_has_filled_go_on_as_without_a_break(data_bin, tmp_path):
    def job(name, updates):
        return [str(data_bin), "--save-dir", str(tmp_path / name), "--max-update", str(updates), *shlex.split(STEPS)]

    jobs = [job("whole", 4), job("broken", 2), job("broken", 4)]
    done = run_jobs(run_all, 2, jobs)
    assert done.returncode == 0, done.stderr
    losses = [[], [], []]
    for line in map(json.loads, done.stdout.splitlines()):
        if "job" in line:
            current = losses[line["job"]]
        elif "gnorm" in line:
            current.append((line["num_updates"], line["loss"], line["gnorm"]))
    assert [len(found) for found in losses] == [4, 2, 2]
    assert losses[1] + losses[2] == losses[0]
