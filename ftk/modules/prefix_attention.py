"""Attention behind a prefix that all see, by kernels of Triton for it (`prefix_kernels`), with dropout inside."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.modules.attention import Front
from ftk.modules.masked_attention import by_mask
from ftk.modules.masks import Visibility

TILES = {"attend": (128, 64, 8, 3), "query_gradients": (128, 64, 8, 3), "key_gradients": (64, 64, 4, 3)}
"""Of each kernel: queries and keys of a block, warps, blocks that are loaded at once; the fastest of eight on an H200
for 64 rows of 512 tokens, 16 heads of 64."""

TILES_OF_DROPOUT = TILES | {"attend": (64, 32, 4, 3), "query_gradients": (64, 32, 4, 3)}
"""The same where weights are dropped, as the words take registers."""


class PrefixAttention(NamedTuple):
    """An `Attend` of one kernel, for sequences that are causal behind a prefix.

    Args:
        visibility: with a prefix, causal, and nothing else.
        dropout, front: as in `MaskedAttention`.
        dtype: of the kernels, of two bytes.
    """

    visibility: Visibility
    dropout: float
    dtype: torch.dtype
    front: Front | None = None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        batch, heads, num_tokens, size = query.shape
        if bias is not None or self.front is not None:
            return by_mask(self.visibility, self.dropout, self.front, query, key, value, bias, scale)
        assert self.visibility.prefix is not None
        prefix = self.visibility.prefix.clamp(0, num_tokens).expand(batch).contiguous()
        words = None
        if self.dropout > 0.0:
            shape = (batch, heads, 2, num_tokens)
            words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=query.device)
        query, key, value = (each.to(self.dtype) for each in (query, key, value))
        scale = size**-0.5 if scale is None else scale
        attended: Tensor = prefix_attention(query, key, value, prefix, words, self.dropout, scale)[0]
        return attended


@torch.library.custom_op("ftk::prefix_attention", mutates_args=())
def prefix_attention(
    query: Tensor, key: Tensor, value: Tensor, prefix: Tensor, words: Tensor | None, dropout: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the keys up to their own and those of the prefix.

    Args:
        query: [B, A, T, D] of two bytes a number.
        key, value: [B, K, T, D], K divides A.
        prefix: int64 [B], from 0 to T.
        words: int32 [B, A, 2, T], any numbers, of queries and of keys, that decide what is dropped; None: nothing is.
        dropout: probability with which an attention weight is dropped.
        scale: of the scores.

    Returns:
        attended [B, A, T, D], and the logarithms of the sums of the exponentials in base 2, float32 [B, A, T]
    """
    from ftk.modules import prefix_kernels as kernels

    query, key, value = (_in_lines(each) for each in (query, key, value))
    (batch, heads, length, _), fixed = query.shape, _fixed("attend", query, key, words)
    result, logs = _results_of(query)
    with torch.cuda.device_of(query):  # Triton launches on the present one
        kernels.attend[-(-length // fixed["BLOCK_Q"]), heads, batch](
            *(query, key, value, prefix, words, result, logs),
            *_strides(query, key, value),
            *(heads, length, scale * math.log2(math.e)),
            *_dropping(dropout),
            **fixed,
        )
    return result, logs


@torch.library.custom_op("ftk::prefix_attention_backward", mutates_args=())
def prefix_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prefix: Tensor,
    words: Tensor | None,
    result: Tensor,
    logs: Tensor,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value by that of the result, [B, A, T, D]; else as `prefix_attention`."""
    from ftk.modules import prefix_kernels as kernels

    grad, query, key, value = (_in_lines(each) for each in (grad, query, key, value))
    batch, heads, length, size = query.shape
    sums = torch.empty_like(logs)
    of_query, of_key, of_value = _gradients_of(query, key, value)
    numbers = (heads, length, scale * math.log2(math.e), scale, *_dropping(dropout))
    given = (query, key, value, prefix, words, grad, logs, sums)
    strides = _strides(query, key, value, grad)
    with torch.cuda.device_of(query):
        fixed = _fixed("query_gradients", query, key, words)
        kernels.shares[-(-length // 64), heads, batch](
            *(result, grad, sums), *_strides(grad), heads, length, SIZE=size, BLOCK_D=fixed["BLOCK_D"], BLOCK_Q=64
        )
        kernels.query_gradients[-(-length // fixed["BLOCK_Q"]), heads, batch](
            *given, of_query, *strides, *_strides(of_query), *numbers, **fixed
        )
        fixed = _fixed("key_gradients", query, key, words)
        kernels.key_gradients[-(-length // fixed["BLOCK_K"]), key.size(1), batch](
            *given, of_key, of_value, *strides, *_strides(of_key), *numbers, **fixed
        )
    return of_query, of_key, of_value


def _fixed(name: str, query: Tensor, key: Tensor, words: Tensor | None) -> dict[str, int]:
    """What a kernel is compiled for."""
    block_q, block_k, warps, stages = (TILES if words is None else TILES_OF_DROPOUT)[name]
    size = query.size(-1)
    fixed = {"GROUP": query.size(1) // key.size(1), "SIZE": size, "BLOCK_D": max(16, 1 << (size - 1).bit_length())}
    return fixed | {"BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}


def _dropping(dropout: float) -> tuple[int, float]:
    """Below which hash a weight is dropped, and the factor of the others."""
    return min(round(dropout * 2**32), 2**32 - 1), 1.0 / (1.0 - dropout)


def _in_lines(heads: Tensor) -> Tensor:
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _strides(*heads: Tensor) -> list[int]:
    return [each.stride(place) for each in heads for place in (0, 1, 2)]


def _results_of(query: Tensor) -> tuple[Tensor, Tensor]:
    """Empty; in memory heads lie within tokens, as the output projection reads them."""
    batch, heads, length, size = query.shape
    result = query.new_empty(batch, length, heads, size).transpose(1, 2)
    return result, query.new_empty(batch, heads, length, dtype=torch.float32)


def _gradients_of(*heads: Tensor) -> tuple[Tensor, ...]:
    return tuple(_results_of(each)[0] for each in heads)


@prefix_attention.register_fake
def _(query: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _results_of(query)


@prefix_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_others: Any) -> tuple[Tensor, ...]:
    return _gradients_of(query, key, value)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, prefix, words, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, prefix, words, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _of_logs: Tensor | None) -> tuple[Tensor | None, ...]:
    found = prefix_attention_backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.scale)
    return *found, None, None, None, None


prefix_attention.register_autograd(_backward, setup_context=_keep)
