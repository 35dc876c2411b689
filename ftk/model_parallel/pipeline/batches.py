"""Shapes of batches, and sequences that several processes can share."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from ftk.errors import UserError

Batch = dict[str, Any]

_POSITIONS = "loss_positions"
"""The one entry of a batch that counts in the flattened [B * T] tokens (`ftk.data.batches.collate.Collater`)."""


class Shape(NamedTuple):
    """Rows and tokens, padding counted."""

    rows: int
    tokens: int


def batch_shape(batch: Batch) -> Shape:
    """B and T of a batch.

    Raises:
        UserError: it has no `tokens` [B, T].
    """
    tokens = batch.get("tokens")
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise UserError("a pipeline needs batches with `tokens` [B, T]; this task's have none")
    return Shape(*tokens.shape)


def lengthened(batch: Batch, multiple: int) -> Batch:
    """A batch with tokens added that carry no loss, so that T is a multiple of `multiple`.

    They follow the others, which do not see them, and are 0 everywhere: a token, a position and a document that
    exist. What does not end in T numbers is left alone.

    Args:
        batch: on the CPU, as the collater made it.
        multiple: processes that share each sequence.
    """
    rows, tokens = batch_shape(batch)
    more = -tokens % multiple
    if more == 0:
        return batch
    longer: Batch = {}
    for name, value in batch.items():
        if name == _POSITIONS:
            longer[name] = value // tokens * (tokens + more) + value % tokens
        elif isinstance(value, Tensor) and value.dim() > 1 and value.size(0) == rows and value.size(-1) == tokens:
            longer[name] = F.pad(value, (0, more))
        else:
            longer[name] = value
    return longer
