"""Batches written with a target at every place and a mask of those that count, as samples have them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ftk.batch import Batch
from ftk.data.batches.collate import dense_batch
from ftk.models.glm import GLMConfig
from ftk.models.glm.model import GLM
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES


def batch_of(dense: Mapping[str, Tensor]) -> Batch:
    """tokens, targets [B, T] int64, loss_mask [B, T] bool; `objective` [B] is a group, others are inputs."""
    return dense_batch({name: value.numpy() for name, value in dense.items()}, {"objective": OBJECTIVES})


def small_glm() -> GLM:
    return GLM(
        GLMConfig(vocab_size=50, num_layers=1, hidden_size=16, num_attention_heads=2, max_positions=12), seed=0
    ).eval()


def small_tensors(loss_share: float = 0.4) -> dict[str, Tensor]:
    """Four samples of 12 tokens for it, with all objectives."""
    generator = torch.Generator().manual_seed(0)
    return {
        "tokens": torch.randint(50, (4, 12), generator=generator),
        "targets": torch.randint(50, (4, 12), generator=generator),
        "loss_mask": torch.rand(4, 12, generator=generator) < loss_share,
        "position_ids": torch.stack((torch.arange(12), torch.zeros(12, dtype=torch.int64))).expand(4, 2, 12),
        "context_length": torch.tensor([0, 3, 5, 11]),
        "objective": torch.tensor([0, 1, 0, 2]),
    }


def tensors_of(batch: Batch) -> list[Tensor]:
    """All that goes to a device."""
    found: list[Tensor] = []
    batch.map(lambda tensor: found.append(tensor) or tensor)
    return found


def same_batches(left: Batch, right: Batch) -> bool:
    """Whether they hold the same numbers of the same types under the same names."""
    own, other = tensors_of(left), tensors_of(right)
    groups = [{name: group.names for name, group in batch.groups.items()} for batch in (left, right)]
    if (
        left.inputs.keys() != right.inputs.keys()
        or groups[0] != groups[1]
        or len(own) != len(other)
        or not np.array_equal(left.sample_ids, right.sample_ids)
    ):
        return False
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(own, other, strict=True))
