"""Samples that say who they are, an iterator over them, and an end for its workers."""

from __future__ import annotations

import numpy as np
import pytest
from number_corpus import NumberTokenizer
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ftk.data.batches.collate import Collater
from ftk.data.batches.iterator import EpochBatchIterator
from tests.dense import same_batches


class Numbers:
    """Samples that say who they are: tokens are (epoch, index) again and again."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def sizes(self, epoch):
        return (3 + (np.arange(self.count) * 7 + epoch) % 11).astype(np.int32)

    def sample(self, epoch, index):
        length = int(self.sizes(epoch)[index])
        tokens = np.full(length, index, dtype=np.int64)
        return {
            "tokens": tokens,
            "targets": tokens + epoch * 1000,
            "loss_mask": np.ones(length, dtype=bool),
            "position_ids": np.zeros((2, length), dtype=np.int64),
            "context_length": np.int64(0),
            "objective": np.int64(0),
        }


COLLATER = Collater(NumberTokenizer(pad=-1).special)


@pytest.fixture(autouse=True)
def workers_end_with_their_test(monkeypatch):
    """PyTorch waits five seconds for workers that a garbage collection ends (see `close`), or to find one dead."""
    made = []
    batches = EpochBatchIterator.batches
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    monkeypatch.setattr(EpochBatchIterator, "batches", lambda self: made.append(self) or batches(self))
    yield
    for each in made:
        each.close()


def iterator(count=40, dataset=None, **options):
    options = {"batch_size": 6, "seed": 3, **options}
    return EpochBatchIterator(dataset or Numbers(count), COLLATER, **options)


def equal_batches(left, right):
    return len(left) == len(right) and all(same_batches(a, b) for a, b in zip(left, right, strict=True))
