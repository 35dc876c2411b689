"""Collating: pads samples of different lengths into one batch of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    from ftk.tokenizers import SpecialTokens


class Collater:
    """Makes a batch of samples.

    Args:
        special: its `pad` fills tokens and targets; loss mask and positions are filled with zeros.
    """

    def __init__(self, special: SpecialTokens) -> None:
        self.pad = special.pad

    def __call__(self, samples: Sequence[dict[str, NDArray]]) -> dict[str, torch.Tensor]:
        """One batch.

        Args:
            samples: at least one, as from `GLMBlankDataset.sample`.

        Returns:
            tokens, targets int64 [B, T]; loss_mask bool [B, T]; position_ids int64 [B, 2, T];
            context_length, objective int64 [B]. T is the longest sample's length. And loss_positions int64 [N]:
            where the flattened loss_mask is true, counted here so that no device has to be waited for.
        """
        import torch  # here, so that commands which only look at data start without it

        batch_size, longest = len(samples), max(len(sample["tokens"]) for sample in samples)
        tokens = np.full((batch_size, longest), self.pad, dtype=np.int64)
        targets = np.full((batch_size, longest), self.pad, dtype=np.int64)
        loss_mask = np.zeros((batch_size, longest), dtype=np.bool_)
        position_ids = np.zeros((batch_size, 2, longest), dtype=np.int64)
        for row, sample in enumerate(samples):
            length = len(sample["tokens"])
            tokens[row, :length] = sample["tokens"]
            targets[row, :length] = sample["targets"]
            loss_mask[row, :length] = sample["loss_mask"]
            position_ids[row, :, :length] = sample["position_ids"]
        arrays = {
            "tokens": tokens,
            "targets": targets,
            "loss_mask": loss_mask,
            "loss_positions": np.flatnonzero(loss_mask),
            "position_ids": position_ids,
            "context_length": np.array([sample["context_length"] for sample in samples], dtype=np.int64),
            "objective": np.array([sample["objective"] for sample in samples], dtype=np.int64),
        }
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
