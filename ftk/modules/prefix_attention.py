"""Attention behind a prefix that all see, by kernels of Triton for it (`prefix_kernels`), with dropout inside."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.modules.attention import Front, separate_heads
from ftk.modules.masked_attention import by_mask
from ftk.modules.masks import Visibility

TILES = {"attend": (128, 64, 8, 3), "query_gradients": (128, 64, 8, 3), "key_gradients": (32, 64, 4, 3)}
"""Of each kernel: queries and keys of a block, warps, blocks that are loaded at once; the fastest of thirty on an H200
for 64 rows of 512 tokens, 16 heads of 64."""

DROPOUT_TILES = {"attend": (64, 32, 4, 3), "query_gradients": (64, 32, 4, 3), "key_gradients": (32, 64, 4, 2)}
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
        if bias is not None or self.front is not None:
            return by_mask(self.visibility, self.dropout, self.front, query, key, value, bias, scale)
        groups = query.transpose(1, 2).unflatten(2, (key.size(1), -1))  # [B, T, K, A/K, D]
        key, value = (tensor.transpose(1, 2).unsqueeze(3) for tensor in (key, value))
        return self.attend_joint(torch.cat([tensor.to(self.dtype) for tensor in (groups, key, value)], dim=3), scale)

    def attend_joint(self, heads: Tensor, scale: float | None = None) -> Tensor:
        """The same of all heads as `Attention` projects them, [B, T, K, A/K + 2, D], without a copy."""
        if self.front is not None:
            return self(*separate_heads(heads), scale=scale)
        batch, num_tokens, key_heads, rows, size = heads.shape
        assert self.visibility.prefix is not None
        prefix = self.visibility.prefix.clamp(0, num_tokens).expand(batch).contiguous()
        words = None
        if self.dropout > 0.0:
            shape = (batch, key_heads * (rows - 2), 2, num_tokens)
            words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device=heads.device)
        scale = size**-0.5 if scale is None else scale
        attended: Tensor = prefix_attention(heads.to(self.dtype), prefix, words, self.dropout, scale)[0]
        return attended.transpose(1, 2)


@torch.library.custom_op("ftk::prefix_attention", mutates_args=())
def prefix_attention(
    joint: Tensor, prefix: Tensor, words: Tensor | None, dropout: float, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of queries to the keys up to their own and those of the prefix.

    Args:
        joint: [B, T, K, A/K + 2, D] of two bytes a number: of each key head its queries, the key and the value.
        prefix: int64 [B], from 0 to T.
        words: int32 [B, A, 2, T], any numbers, of queries and of keys, that decide what is dropped; None: nothing is.
        dropout: probability with which an attention weight is dropped.
        scale: of the scores.

    Returns:
        attended [B, T, A, D], and the logarithms of the sums of the exponentials in base 2, float32 [B, A, T]
    """
    from ftk.modules import prefix_kernels as kernels

    joint, fixed = joint.contiguous(), _compile_constants("attend", joint, words)
    result, logs = _empty_results(joint)
    batch, length, heads, _ = result.shape
    with torch.cuda.device_of(joint):  # Triton launches on the present one
        kernels.attend[-(-length // fixed["BLOCK_Q"]), heads, batch](
            *(joint, prefix, words, result, logs, heads, length, scale * math.log2(math.e)),
            *_dropping(dropout),
            **fixed,
        )
    return result, logs


@torch.library.custom_op("ftk::prefix_attention_backward", mutates_args=())
def prefix_attention_backward(
    grad: Tensor,
    joint: Tensor,
    prefix: Tensor,
    words: Tensor | None,
    result: Tensor,
    logs: Tensor,
    dropout: float,
    scale: float,
) -> Tensor:
    """The gradient of `joint` by that of the result, [B, T, A, D]; else as `prefix_attention`."""
    from ftk.modules import prefix_kernels as kernels

    grad, joint = grad.contiguous(), joint.contiguous()
    batch, length, heads, size = grad.shape
    sums, joint_grad = torch.empty_like(logs), torch.empty_like(joint)
    given = (joint, prefix, words, grad, logs, sums, joint_grad)
    numbers = (heads, length, scale * math.log2(math.e), scale, *_dropping(dropout))
    with torch.cuda.device_of(joint):
        fixed = _compile_constants("query_gradients", joint, words)
        kernels.shares[-(-length // 64), heads, batch](
            result, grad, sums, heads, length, SIZE=size, BLOCK_D=fixed["BLOCK_D"], BLOCK_Q=64
        )
        kernels.query_gradients[-(-length // fixed["BLOCK_Q"]), heads, batch](*given, *numbers, **fixed)
        fixed = _compile_constants("key_gradients", joint, words)
        kernels.key_gradients[-(-length // fixed["BLOCK_K"]), joint.size(2), batch](*given, *numbers, **fixed)
    return joint_grad


def _compile_constants(name: str, joint: Tensor, words: Tensor | None) -> dict[str, int]:
    block_q, block_k, warps, stages = (TILES if words is None else DROPOUT_TILES)[name]
    rows, size = joint.shape[3:]
    fixed = {"GROUP": rows - 2, "SIZE": size, "BLOCK_D": max(16, 1 << (size - 1).bit_length())}
    if name == "key_gradients" and size <= 64:
        fixed["maxnreg"] = 128  # so that four programs fit; larger heads would not fit into the registers
    return fixed | {"BLOCK_Q": block_q, "BLOCK_K": block_k, "num_warps": warps, "num_stages": stages}


def _dropping(dropout: float) -> tuple[int, float]:
    """Below which hash a weight is dropped, and the factor of the others."""
    return min(round(dropout * 2**32), 2**32 - 1), 1.0 / (1.0 - dropout)


def _empty_results(joint: Tensor) -> tuple[Tensor, Tensor]:
    batch, length, key_heads, rows, size = joint.shape
    heads = key_heads * (rows - 2)
    return joint.new_empty(batch, length, heads, size), joint.new_empty(batch, heads, length, dtype=torch.float32)


@prefix_attention.register_fake
def _(joint: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(joint)


@prefix_attention_backward.register_fake
def _(grad: Tensor, joint: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(joint, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    joint, prefix, words, ctx.dropout, ctx.scale = inputs
    ctx.save_for_backward(joint, prefix, words, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _of_logs: Tensor | None) -> tuple[Tensor | None, ...]:
    return prefix_attention_backward(grad, *ctx.saved_tensors, ctx.dropout, ctx.scale), None, None, None, None


prefix_attention.register_autograd(_backward, setup_context=_keep)
