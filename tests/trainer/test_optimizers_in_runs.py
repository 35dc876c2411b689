"""Runs with each optimizer, stopped and continued; groups with a schedule of their own."""

from __future__ import annotations

import pytest

from ftk.errors import UserError
from ftk.registry import OPTIMIZERS
from tests.trainer.toy import ToyModel, assert_same, toy_trainer

GROUPS = [
    "embedding = adafactor lr=0.05 beta1=0.5",
    "norm = sgd lr=0.1 lr_scheduler=constant",
    "output.weight = muon lr=0.02 lr_scheduler=linear decay_updates=8",
    "* = lion",
]
OPTIONS = {
    "training__validate_interval_updates": 2,
    "dataloader__batch_size": 3,
    "logging__log_interval": 5,
}


def trainer_with(tmp_path, name, **options):
    groups = {"optimizer__groups": GROUPS} if name == "composite" else {}
    return toy_trainer(tmp_path, optimizer=name, **groups, **OPTIONS, **options)


@pytest.mark.parametrize("name", [*OPTIMIZERS.names(), "torch.optim.NAdam"])
def test_a_continued_run_equals_the_uninterrupted_one(name, tmp_path):
    whole = trainer_with(tmp_path, name, save_dir="whole", training__max_update=12)
    whole.train()
    options = {"lr_scheduler__decay_updates": 9}  # as the whole run has it
    trainer_with(tmp_path, name, training__max_update=8, **options).train()
    resumed = trainer_with(tmp_path, name, training__max_update=12, **options)
    assert resumed.state.num_updates == 8
    resumed.train()
    assert_same(resumed, whole)


def test_groups_have_the_rates_of_their_own_schedules(tmp_path):
    trainer = trainer_with(tmp_path, "composite", training__max_update=6, lr_scheduler__warmup_updates=0)
    trainer.train()
    rates = {name: group["lr"] for group in trainer.run.optimizer.param_groups for name in group["names"]}
    share = 1 - 5 / 6  # of the run's linear decay, in the sixth update
    assert rates["embedding.weight"] == pytest.approx(0.05 * share)
    assert rates["output.bias"] == pytest.approx(0.01 * share)
    assert rates["output.weight"] == pytest.approx(0.02 * (1 - 5 / 8))
    assert rates["norm.weight"] == rates["norm.bias"] == pytest.approx(0.1)


def test_a_group_that_takes_nothing_ends_the_run_before_it_begins(tmp_path):
    options = {"optimizer": "composite", "optimizer__groups": ["encoder = sgd", "* = adamw"]}
    with pytest.raises(UserError, match="`groups` 'encoder' matches no trained parameter; there are for example"):
        toy_trainer(tmp_path, model=ToyModel(), **options)
    assert not (tmp_path / "run").exists()
