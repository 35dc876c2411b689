"""Samples of classification: a sample is a row of data, with what the model reads of it and where it is scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.batch import Batch
from ftk.data.batches.collate import Collater
from ftk.data.supervised.labelled import MULTIPLE_CHOICE, REGRESSION, TOKEN_LABELS, LabelledText
from ftk.tasks.classification.reading import EncodedRow, TextReader


class ClassificationDataset:
    """The rows of a split.

    Args:
        texts: N, each with a label.
        encoded: the same in tokens.
        reader: has encoded them.
        weights: float32 [K], of the labels; None: 1.
    """

    def __init__(
        self,
        texts: Sequence[LabelledText],
        encoded: Sequence[EncodedRow],
        reader: TextReader,
        weights: NDArray[np.float32] | None,
    ) -> None:
        self._labels = [text.label for text in texts]
        self._encoded, self._reader, self._weights = encoded, reader, weights
        # Batches are as wide as their longest row, and any of their samples may have the most choices.
        self.most_rows = max(len(row.pairs) for row in encoded)
        self._num_tokens = np.array([row.num_tokens for row in encoded], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._encoded)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """int32 [N]: tokens of all that is read of a row, at most."""
        return self._num_tokens * np.int32(self.most_rows)

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        """One row.

        Returns:
            rows: inputs of the model, one for each pair of texts; places: (row, place) of each of the n hidden states
            that are scored; targets [n]: int64 labels, float32 numbers, or bool, which choice is right; perhaps weights
            float32 [n].
        """
        label, encoded, kind = self._labels[index], self._encoded[index], self._reader.rows.kind
        rows, places = self._reader.read(encoded)
        if kind == MULTIPLE_CHOICE:
            targets: NDArray[Any] = np.arange(len(rows)) == label
        elif kind == TOKEN_LABELS:
            targets = np.array(label, dtype=np.int64)[: len(places)]
        else:
            targets = np.array([label], dtype=np.float32 if kind == REGRESSION else np.int64)
        weights = {} if self._weights is None else {"weights": self._weights[targets]}
        return {"rows": rows, "places": places, "targets": targets, **weights}


class ClassificationCollater(Collater):
    """Makes a batch of the rows of a `ClassificationDataset`, as the criterion `classification` reads it."""

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Batch:
        import torch

        inputs = self.arrays([row for sample in samples for row in sample["rows"]])
        width = inputs.get("decoder_tokens", inputs["tokens"]).shape[1]
        before = np.cumsum([0, *(len(sample["rows"]) for sample in samples)])
        sample_of, places, begins = [], [], []  # of each target
        for number, sample in enumerate(samples):
            for count, (row, place) in enumerate(sample["places"]):
                sample_of.append(number)
                places.append((before[number] + row) * width + place)
                begins.append(count == 0)
        targets = torch.from_numpy(np.concatenate([sample["targets"] for sample in samples]))  # [N]
        weights = None
        if "weights" in samples[0]:
            weights = torch.from_numpy(np.concatenate([sample["weights"] for sample in samples]))
        extras = {"begins": torch.tensor(begins)}
        if targets.dtype == torch.bool:
            extras = {"question": torch.tensor(sample_of), "answerable": torch.ones(len(samples))}
        tensors = {name: torch.from_numpy(array) for name, array in inputs.items()}
        return Batch(tensors, targets, torch.tensor(places), weights=weights, extras=extras)
