"""Runs with each optimizer, stopped and continued."""

from __future__ import annotations

import pytest

from ftk.registry import OPTIMIZERS
from tests.trainer.toy import assert_same, toy_trainer

OPTIONS = {"training__validate_interval_updates": 2, "dataloader__batch_size": 3, "logging__log_interval": 5}


def trainer_with(tmp_path, name, **options):
    return toy_trainer(tmp_path, optimizer=name, **OPTIONS, **options)


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
