"""Samples of pairs: a sample is a pair, with a row for each of its answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.batch import Batch
from ftk.data.batches.collate import Collater, dense_batch
from ftk.tasks.answering.samples import AnswerDataset


class PairDataset:
    """A sample for each pair, every epoch the same ones.

    Args:
        chosen, rejected: the answers of the pairs.

    Attributes:
        questions: as ftk-generate asks them.
    """

    def __init__(self, chosen: AnswerDataset, rejected: AnswerDataset) -> None:
        self.sides, self.questions = (chosen, rejected), chosen.questions
        # Batches are as wide as their longest row.
        self._sizes = 2 * np.maximum(*(side.sizes(1) for side in self.sides))

    def __len__(self) -> int:
        return len(self._sizes)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of both rows of each pair, at most; int32 [len]"""
        return self._sizes

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        """One pair: `rows`, two samples as `answer_sample` makes them."""
        return {"rows": [side.sample(epoch, index) for side in self.sides]}


class PairCollater(Collater):
    """Makes a batch of pairs, as `ftk.criterions.preference` reads it.

    `weights` leaves rejected answers out of losses that know no pairs.
    """

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        import torch

        arrays = self.arrays([row for sample in samples for row in sample["rows"]])
        batch, lengths = dense_batch(arrays), arrays["loss_mask"].sum(axis=1)
        answer = batch.places // arrays["loss_mask"].shape[1]
        extras = {"answer": answer, "lengths": torch.from_numpy(lengths.reshape(-1, 2).astype(np.float32))}
        return dataclasses.replace(batch, extras=extras, weights=1.0 - (answer % 2).float())
