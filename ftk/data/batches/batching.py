"""Batching: cuts the samples of an epoch, in their order, into batches by number of samples or of tokens."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ftk.data.batches._batching import batch_bounds
from ftk.errors import UserError


def batch_by_size(
    sizes: NDArray[np.integer],
    *,
    batch_size: int | None = None,
    max_tokens: int | None = None,
    required_batch_size_multiple: int = 1,
) -> NDArray[np.int64]:
    """Bounds of contiguous batches, each as large as the limits allow.

    A batch depends only on the sizes from its first sample on: cutting what is left after a batch gives the same
    batches again.

    Args:
        sizes: integers [N], tokens of each sample, in the order of the epoch.
        batch_size: samples in a batch at most.
        max_tokens: tokens in a batch at most, padding to its longest sample counted.
        required_batch_size_multiple: a batch with more samples than this has a multiple of it.

    Returns:
        int64 [batches + 1]: batch b is the samples bounds[b] .. bounds[b + 1] - 1. [0] without samples.

    Raises:
        UserError: no limit is given, a limit is below 1, or a sample alone is beyond max_tokens.
    """
    if batch_size is None and max_tokens is None:
        raise UserError("batches need a limit: give `batch_size` or `max_tokens`")
    for flag, value in (
        ("`batch_size`", batch_size),
        ("`max_tokens`", max_tokens),
        ("`required_batch_size_multiple`", required_batch_size_multiple),
    ):
        if value is not None and value < 1:
            raise UserError(f"{flag} {value}: it must be at least 1")
    sizes = np.ascontiguousarray(sizes, dtype=np.int32)
    if max_tokens is not None and len(sizes) and sizes.max() > max_tokens:
        raise UserError(
            f"`max_tokens` {max_tokens}: a sample can have {sizes.max()} tokens; give at least that, "
            f"or a smaller `seq_length`"
        )
    return batch_bounds(sizes, batch_size or 0, max_tokens or 0, required_batch_size_multiple)
