"""The Trainer follows the twenty updates of the original GLM code (tests/golden/glm_tiny/train.npz)."""

from __future__ import annotations

import numpy as np
import pytest

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.trainer.log.records import read_records
from tests.dense import batch_of
from tests.golden_glm import read_arrays, read_model
from tests.trainer.toy import ToyTask, toy_trainer


class OneBatchAnEpoch:
    """The golden batches in turn, each a whole epoch."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return 1

    def sizes(self, epoch):
        return np.array([24], dtype=np.int32)

    def sample(self, epoch, index):
        return self.batches[(epoch - 1) % 2]


def only(samples):
    [batch] = samples
    return batch_of(batch)


class GoldenTask(ToyTask):
    def load_split(self, split):
        golden = read_arrays("train.npz")
        names = {"tokens": "input_ids", "context_length": "sep", "position_ids": "position_ids", "targets": "targets"}
        batches = []
        for turn in range(2):
            batch = {ours: golden[theirs][turn] for ours, theirs in names.items()}
            batches.append({**batch, "loss_mask": golden["loss_mask"][turn].bool()})
        return OneBatchAnEpoch(batches)

    def collater(self):
        return only


def test_twenty_updates_are_those_of_the_original(tmp_path):
    toy_trainer(
        tmp_path,
        task=GoldenTask(tmp_path),
        model=read_model(),
        criterion=CrossEntropy(CrossEntropyConfig()),
        optimizer__lr=1e-3,
        optimizer__weight_decay=0.1,
        lr_scheduler="constant",
        lr_scheduler__warmup_updates=0,
        training__max_update=20,
        dataloader__valid_subset=None,
        logging__log_interval=1,
        checkpoint__save=False,
    ).train()
    golden = read_arrays("train.npz")
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    assert [record["loss"] for record in records] == pytest.approx(golden["losses"].tolist(), abs=1e-3)
    assert [record["gnorm"] for record in records] == pytest.approx(golden["grad_norms"].tolist(), abs=1e-3)
    assert records[-1]["loss"] < records[0]["loss"] - 0.5
