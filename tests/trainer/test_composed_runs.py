"""Runs on composed data: stopped in the middle of an epoch and continued, they end with the same bits."""

from __future__ import annotations

import dataclasses
import shlex

import pytest

from ftk.config import compose
from ftk.tasks.glm_blank.config import max_sample_length
from ftk.trainer import build_run
from ftk.trainer.config import TrainConfig
from tests.trainer.test_glm_runs import glm_trainer
from tests.trainer.toy import assert_same

SORTED = {"dataloader__bucket_window": 12, "dataloader__curriculum_updates": 2, "task__sample_one_document": True}


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("{0},{0}", {"dataset__data_weights": [3.0, 1.0], "dataloader__curriculum_updates": 9}),
        ("{0}:{0},{0}", {"dataset__data_temperature": 3.0, **SORTED}),
        ("{0}:{0}", {"dataloader__num_workers": 1}),
    ],
)
def test_an_interrupted_run_on_composed_data_ends_with_the_same_bits(tmp_path, data_bin, data, options):
    data = data.format(data_bin)
    options = {**options, "training__max_update": 12, "training__validate_interval_updates": 0}
    whole = glm_trainer(data, tmp_path / "whole", **options)
    whole.train()
    for signal_at, num_workers in ((2, 1), (7, 0)):
        folder = tmp_path / f"stopped at {signal_at}"
        stopped = glm_trainer(data, folder, signal_at=signal_at, **options)
        assert stopped.train().signal == "SIGTERM"
        assert stopped.state.iterator["samples_consumed"] > 0
        resumed = glm_trainer(data, folder, **{**options, "dataloader__num_workers": num_workers})
        resumed.train()
        assert resumed.state.num_updates == 12
        assert_same(resumed, whole)


@pytest.mark.parametrize("task", ["--arch glm_tiny", "--task causal_lm --arch gpt2_tiny"])
def test_the_texts_of_an_update_are_as_long_as_the_curriculum_allows(tmp_path, data_bin, task):
    flags = (
        "--seq-length 64 --batch-size 2 --update-freq 2 --curriculum-updates 10 --max-epoch 1 --device cpu --no-save"
    )
    argv = [str(data_bin), "--save-dir", str(tmp_path / "run"), *shlex.split(f"{task} {flags}")]
    run = build_run(compose(TrainConfig, "ftk-train", "", argv))
    found = []
    for number, batch in enumerate(run.train_iterator.batches()):
        update = number // 2
        longest = max(16, min(64, 64 * (1 + 7 * (update + 1) / 10) // 8))
        if task == "--arch glm_tiny":  # the text, and its answers a second time
            longest = max_sample_length(dataclasses.replace(run.config.task.config, seq_length=int(longest)))
        found.append(batch.inputs["tokens"].shape[1])
        assert found[-1] <= longest, update
    assert max(found[:4]) < max(found[4:12]) < max(found[20:])
    assert len(found) > 30
