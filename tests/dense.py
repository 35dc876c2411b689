"""Batches written with a target at every place and a mask of those that count, as samples have them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ftk.batch import Batch
from ftk.data.batches.collate import dense_batch
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES


def batch_of(dense: Mapping[str, Tensor]) -> Batch:
    """tokens, targets [B, T] int64, loss_mask [B, T] bool; `objective` [B] is a group, others are inputs."""
    return dense_batch({name: value.numpy() for name, value in dense.items()}, {"objective": OBJECTIVES})


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
