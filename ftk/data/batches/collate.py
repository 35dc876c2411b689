"""Collating: pads samples of different lengths into one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from ftk.tokenizers import SpecialTokens


class Collater:
    """Makes a batch of samples.

    Args:
        special: its `pad` (0 if there is none) fills tokens and targets; loss mask and positions are filled with zeros.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.pad = 0 if special.pad is None else special.pad

    def __call__(self, samples: Sequence[dict[str, NDArray]]) -> dict[str, torch.Tensor]:
        """One batch.

        Args:
            samples: at least one, as from `GLMBlankDataset.sample`, or the SampleBatch of its `samples`, which
                has the arrays ready.

        Returns:
            tokens, targets int64 [B, T]; loss_mask bool [B, T]; position_ids int64 [B, 2, T];
            context_length, objective int64 [B]; with a document mask document_ids int64 [B, T], -1 in padding.
            T is the longest sample's length. And loss_positions int64 [N]:
            where the flattened loss_mask is true, counted here so that no device has to be waited for.
        """
        import torch  # here, so that commands which only look at data start without it

        arrays = samples.arrays if isinstance(samples, SampleBatch) else self._padded(samples)
        batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
        batch["loss_positions"] = torch.from_numpy(np.flatnonzero(arrays["loss_mask"]))
        return batch

    def _padded(self, samples: Sequence[dict[str, NDArray]]) -> dict[str, NDArray]:
        """The arrays of a batch, of samples that were made one by one."""
        longest = max(len(sample["tokens"]) for sample in samples)
        arrays: dict[str, NDArray] = {}
        for name, first in samples[0].items():
            shape = np.shape(first)
            if not shape:
                arrays[name] = np.array([sample[name] for sample in samples])
                continue
            arrays[name] = np.full((len(samples), *shape[:-1], longest), self._fill(name), dtype=first.dtype)
            for row, sample in enumerate(samples):
                arrays[name][row, ..., : sample[name].shape[-1]] = sample[name]
        return arrays

    def _fill(self, name: str) -> int:
        return {"tokens": self.pad, "targets": self.pad, "document_ids": -1}.get(name, 0)


class SampleBatch(Sequence):
    """Samples that were made together: a sequence of samples, and their padded arrays.

    Args:
        arrays: of the batch, [B, ...]; those of more than one axis end in T, the longest sample's length.
        lengths: int64 [B], tokens of each sample.
    """

    def __init__(self, arrays: dict[str, NDArray], lengths: NDArray[np.int64]) -> None:
        self.arrays = arrays
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: Any) -> Any:
        """One sample, without padding."""
        if isinstance(row, slice):
            return [self[number] for number in range(*row.indices(len(self)))]
        length = self.lengths[row]
        return {
            name: array[row, ..., :length] if array.ndim > 1 else np.asarray(array[row])
            for name, array in self.arrays.items()
        }
