"""Attention of whole sequences without a mask: each query sees runs of keys, which torch's flash kernels take as they
are, with dropout inside."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.modules.attention import Attend, Front
from ftk.modules.flex_attention import HAS_TRITON
from ftk.modules.masked_attention import by_mask, sdpa
from ftk.modules.masks import Visibility
from ftk.registry import register_attention

VARLEN_MAX_HEAD_SIZE = 128
"""The largest D of the flash kernels whose backward pass has dropout on every GPU that runs them."""

PREFIX_TOKENS = range(16, 2**15)
"""Of a sequence, for the kernels of `prefix_attention`, whose places in it are numbers of 32 bits."""

PREFIX_MEASURED_HEAD_SIZE = 64
"""The largest D with which they are known to be faster than `flex`."""

PREFIX_MIN_SHARED_MEMORY = 160 * 1024
"""Bytes that a program of theirs must be able to have, for what it loads ahead."""


class Replays:
    """Whether this process replays its passes as CUDA graphs.

    Only then do the kernels of `prefix_attention` gain, as the host takes longer to launch them than two calls of the
    flash kernel.

    Attributes:
        are_on: set by who records passes.
    """

    are_on = False


class Runs(NamedTuple):
    """Queries and keys cut into N pairs of runs, each of which meets within itself.

    Attributes:
        queries, keys: int32 [N + 1], where the runs begin, and the end of the last.
        max_queries, max_keys: no run is longer.
        is_causal: the last query of a run sees all keys of its run, each one before it one less; else all see all.
    """

    queries: Tensor
    keys: Tensor
    max_queries: int
    max_keys: int
    is_causal: bool


class VarlenAttention(NamedTuple):
    """An `Attend` of one or two calls of a flash kernel, each on runs of all queries and keys.

    A run of queries with an empty run of keys costs nothing, so that a call may leave queries out; lengths are on the
    device, and nothing waits for them.

    Args:
        runs: of the first call.
        then: of the second call; None: there is none.
        is_then: bool [B T, 1, 1], the queries whose result is that of the second call; None: there is none.
        order: int64 [B T], the places in the batch in the order in which runs have them, and [B T], that of each place;
            None: it is that of the batch.
        visibility: the same as a mask, for a bias and for keys in front.
        dropout, front: as in `MaskedAttention`.
        dtype: of the kernels.
    """

    runs: Runs
    then: Runs | None
    is_then: Tensor | None
    order: tuple[Tensor, Tensor] | None
    visibility: Visibility
    dropout: float
    dtype: torch.dtype
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        batch, _, num_tokens, _ = query.shape
        if bias is not None or self.front is not None:
            return by_mask(self.visibility, self.dropout, self.front, query, key, value, bias, scale)
        # Autocast does not know this operator.
        query, key, value = (tensor.to(self.dtype).transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
        if self.order is not None:
            query, key, value = (tensor.index_select(0, self.order[0]) for tensor in (query, key, value))
        attended = flash_attention(query, key, value, self.runs, scale, self.dropout)  # [B T, A, D]
        if self.then is not None and self.is_then is not None:
            then = flash_attention(query, key, value, self.then, scale, self.dropout)
            attended = torch.where(self.is_then, then, attended)
        if self.order is not None:
            attended = attended.index_select(0, self.order[1])
        return attended.unflatten(0, (batch, num_tokens)).transpose(1, 2)


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, runs: Runs, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """What each run of queries attends to in its run of keys, by torch's flash kernel; 0 where that is empty.

    `torch.nn.attention.varlen` is the same operator without dropout.

    Args:
        query: [T, A, D], of all runs.
        key, value: [S, K, D].
        runs: which belong together.
        scale: as in `Attend`.
        dropout: probability with which an attention weight is dropped.

    Returns:
        attended [T, A, D]
    """
    # Where no run is longer than 1, the kernel takes each for one query of the heads that share a key, empty ones too.
    bounds = runs.queries, runs.keys, max(runs.max_queries, 2), runs.max_keys
    attended: Tensor = torch.ops.aten._flash_attention_forward(
        query, key, value, *bounds, dropout, runs.is_causal, False, scale=scale
    )[0]
    return attended


def has_flash(device: torch.device) -> bool:
    """Whether torch's flash kernels run there: an NVIDIA GPU of Ampere or newer."""
    is_built = torch.version.cuda is not None and torch.backends.cuda.is_flash_attention_available()
    return device.type == "cuda" and is_built and torch.cuda.get_device_properties(device).major >= 8


def is_slow_behind_prefix(visibility: Visibility, num_tokens: int, head_size: int, device: torch.device) -> bool:
    """Whether there is a prefix, and `varlen` has no kernels for it, or was not measured with heads as large."""
    if visibility.prefix is None:
        return False
    has_kernels = visibility.documents is None and takes_prefix_kernels(num_tokens, num_tokens, device)
    return not has_kernels or head_size > PREFIX_MEASURED_HEAD_SIZE


def takes_prefix_kernels(num_tokens: int, num_keys: int, device: torch.device) -> bool:
    """Whether sequences of T queries and S keys are those of the kernels; a model compiled as a whole has none."""
    # What is asked of a length bounds it in an exported program: that comes last.
    can = Replays.are_on and not torch.compiler.is_compiling() and has_prefix_kernels(device)
    return can and num_tokens == num_keys and num_tokens in PREFIX_TOKENS


@cache
def has_prefix_kernels(device: torch.device) -> bool:
    """Whether the kernels run there; tried once, as Triton needs a C compiler."""
    if device.type != "cuda" or torch.version.cuda is None or not HAS_TRITON:
        return False
    properties: Any = torch.cuda.get_device_properties(device)
    if properties.shared_memory_per_block_optin < PREFIX_MIN_SHARED_MEMORY:
        return False
    from ftk.modules.few_rows_triton import can_run

    return can_run(device)


@register_attention("varlen")
def varlen(
    visibility: Visibility,
    num_tokens: int,
    device: torch.device,
    dropout: float,
    dtype: torch.dtype,
    num_keys: int | None = None,
) -> Attend:
    """Tokens behind a prefix that all see, documents with or without one, or sequences of several lengths; all else is
    left to `sdpa`, which needs no mask either where a plain triangle or everything is seen.

    A prefix alone has kernels of its own where Triton runs and passes are replayed (`prefix_attention`)."""
    prefix, length = visibility.prefix, visibility.length
    if not visibility.in_runs or (prefix is None and length is None and visibility.documents is None):
        return sdpa(visibility, num_tokens, device, dropout, dtype, num_keys)
    if visibility.documents is not None:
        return _within_documents(visibility, visibility.documents, dropout, dtype)
    num_keys = num_tokens if num_keys is None else num_keys
    first_queries, first_keys = (
        torch.arange(visibility.num_rows, dtype=torch.int32, device=device) * size for size in (num_tokens, num_keys)
    )
    ends = visibility.num_rows * num_tokens, visibility.num_rows * num_keys
    if prefix is None:
        assert length is not None
        # All queries of a row meet its first keys, and no query meets the rest.
        queries = _boundaries(first_queries, first_queries + num_tokens, ends[0])
        keys = _boundaries(first_keys, first_keys + length.clamp(1, num_keys).int(), ends[1])
        runs = Runs(queries, keys, num_tokens, num_keys, False)
        return VarlenAttention(runs, None, None, None, visibility, dropout, dtype)
    if takes_prefix_kernels(num_tokens, num_keys, device):
        from ftk.modules.prefix_attention import PrefixAttention  # the operators take torch's compiler to register

        return PrefixAttention(visibility, dropout, dtype)
    prefix = prefix.clamp(0, num_tokens).int()
    queries = _boundaries(first_queries, first_queries + prefix, ends[0])
    # The prefix meets itself whole, and so does what follows it, which the second call computes again: behind the
    # prefix causally with all keys of the row, while the prefix meets no key.
    whole = Runs(queries, queries, num_tokens, num_keys, False)
    behind = Runs(queries, _boundaries(first_keys, first_keys, ends[1]), num_tokens, num_keys, True)
    is_behind = torch.arange(num_tokens, device=device) >= prefix[:, None]  # [B, T]
    return VarlenAttention(whole, behind, is_behind.view(-1, 1, 1), None, visibility, dropout, dtype)


def _within_documents(visibility: Visibility, documents: Tensor, dropout: float, dtype: torch.dtype) -> VarlenAttention:
    """The same for each document of a row, which has its part of the prefix and what follows that.

    Args:
        visibility: causal, with `num_documents`.
        documents: its own, [B, T].
    """
    assert visibility.num_documents is not None
    (batch, num_tokens), device = documents.shape, documents.device
    is_behind = torch.ones_like(documents, dtype=torch.bool)  # [B, T]
    if visibility.prefix is not None:
        is_behind = torch.arange(num_tokens, device=device) >= visibility.prefix[:, None]
    # Of padding, -1, then of each document: its part of the prefix, and what follows.
    run = 2 * (documents + 1) + is_behind  # [B, T]
    counts = torch.zeros(batch, 2 * (visibility.num_documents + 1), dtype=torch.int64, device=device)
    counts.scatter_add_(1, run, torch.ones_like(run))
    ends = counts.flatten().cumsum(0, dtype=torch.int32)
    queries = torch.cat((ends.new_zeros(1), ends))
    keys = _boundaries(queries[:-1:2], queries[:-1:2], batch * num_tokens)
    rows = torch.arange(batch, device=device)[:, None] * num_tokens
    order = (run.argsort(dim=1, stable=True) + rows).flatten()
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))
    is_then = is_behind.flatten()[order].view(-1, 1, 1)
    whole = Runs(queries, queries, num_tokens, num_tokens, False)
    behind = Runs(queries, keys, num_tokens, num_tokens, True)
    return VarlenAttention(whole, behind, is_then, (order, places), visibility, dropout, dtype)


def _boundaries(first: Tensor, second: Tensor, end: int) -> Tensor:
    """Where the two runs of each row begin, int32 [B] each, and the end of all -> int32 [2 B + 1]"""
    return torch.cat((torch.stack((first, second), dim=1).flatten(), first.new_full((1,), end)))
