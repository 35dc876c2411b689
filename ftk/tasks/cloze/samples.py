"""Samples of cloze questions: a sample is a question, with a row for each candidate, or one for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ftk.batch import Batch
from ftk.data.batches.collate import Collater, dense_batch
from ftk.data.supervised.cloze import ClozeQuestion
from ftk.generation.questions import EncodedCloze
from ftk.tasks.answers import answer_sample

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing


class ClozeDataset:
    """The questions of a split.

    Args:
        questions: N, each with a label.
        encoded: the same in tokens.
        shares_row: whether the candidates are single tokens at one place, so that one row serves all of a question.
    """

    def __init__(
        self,
        questions: Sequence[ClozeQuestion],
        encoded: Sequence[EncodedCloze],
        framing: Framing,
        shares_row: bool,
    ) -> None:
        self._right = [question.right or () for question in questions]
        self._encoded = encoded
        self._framing = framing
        self._shares_row = shares_row
        # Batches are as wide as their longest row, and any of their questions may have the most candidates.
        self.most_rows = 1 if shares_row else max(len(question.answers) for question in encoded)
        self._num_tokens = np.array([question.num_tokens for question in encoded], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._encoded)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """int32 [N]: tokens of all rows of a question, at most."""
        return self._num_tokens * np.int32(self.most_rows)

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        """One question.

        Returns:
            rows: samples as `answer_sample` makes them, one for each of the K candidates or the right one's alone;
            right bool [K]; divisor float32 [K]; if the candidates share a row also token int64 [K].
        """
        question = self._encoded[index]
        right = np.zeros(len(question.answers), dtype=np.bool_)
        right[[*self._right[index]]] = True
        sample: dict[str, Any] = {"right": right, "divisor": np.array(question.divisors, dtype=np.float32)}
        numbers: Sequence[int] = range(len(question.answers))
        if self._shares_row:
            numbers = self._right[index]
            sample["token"] = np.array([token for (token,) in question.answers], dtype=np.int64)
        sample["rows"] = [
            answer_sample(self._framing, self._framing.ask(*question.texts[number]), question.answers[number])
            for number in numbers
        ]
        return sample


class ChoiceCollater(Collater):
    """Makes a batch of the questions of a `ClozeDataset`, as `ftk.criterions.choice_cross_entropy` reads it.

    `weights` leaves wrong candidates out of losses that know no candidates.
    """

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        import torch

        arrays = self.arrays([row for sample in samples for row in sample["rows"]])
        batch = dense_batch(arrays)
        right = torch.from_numpy(np.concatenate([sample["right"] for sample in samples]))  # [C]
        counts = [len(sample["right"]) for sample in samples]
        extras = {
            "right": right,
            "question": torch.from_numpy(np.repeat(np.arange(len(samples)), counts)),
            "answerable": torch.tensor([float(sample["right"].any()) for sample in samples]),
        }
        if "token" in samples[0]:
            extras["token"] = torch.from_numpy(np.concatenate([sample["token"] for sample in samples]))
            return dataclasses.replace(batch, extras=extras)
        extras["candidate"] = batch.places // arrays["loss_mask"].shape[1]
        extras["divisor"] = torch.from_numpy(np.concatenate([sample["divisor"] for sample in samples]))
        return dataclasses.replace(batch, extras=extras, weights=right[extras["candidate"]].float())
