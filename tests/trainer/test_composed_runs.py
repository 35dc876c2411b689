"""Runs on composed data: stopped in the middle of an epoch and continued, they end with the same bits."""

from __future__ import annotations

import pytest

from tests.trainer.test_glm_runs import glm_trainer
from tests.trainer.toy import assert_same

SORTED = {"dataloader__bucket_window": 12, "dataloader__curriculum_updates": 2, "task__sample_one_document": True}


@pytest.mark.parametrize(("signal_at", "num_workers"), [(2, 1), (7, 0)])
@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("{0},{0}", {"dataset__data_weights": [3.0, 1.0]}),
        ("{0}:{0},{0}", {"dataset__data_temperature": 3.0, **SORTED}),
        ("{0}:{0}", {"dataloader__num_workers": 1}),
    ],
)
def test_an_interrupted_run_on_composed_data_ends_with_the_same_bits(
    tmp_path, data_bin, data, options, signal_at, num_workers
):
    data = data.format(data_bin)
    options = {**options, "training__max_update": 12, "training__validate_interval_updates": 0}
    whole = glm_trainer(data, tmp_path / "whole", **options)
    whole.train()
    stopped = glm_trainer(data, tmp_path / "run", signal_at=signal_at, **options)
    assert stopped.train().signal == "SIGTERM"
    assert stopped.state.iterator["samples_consumed"] > 0
    resumed = glm_trainer(data, tmp_path / "run", **{**options, "dataloader__num_workers": num_workers})
    resumed.train()
    assert resumed.state.num_updates == 12
    assert_same(resumed, whole)
