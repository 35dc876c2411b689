"""Dropout that keeps little and does not wait for random numbers on a CPU, and of whole samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_STEPS = 2**16
"""Of a probability: what 16 random bits can tell apart."""


class Dropout(nn.Dropout):
    """`torch.nn.Dropout` by `dropout`."""

    def forward(self, input: Tensor) -> Tensor:
        return dropout(input, self.p) if self.training else input


def dropout(values: Tensor, p: float) -> Tensor:
    """Each value is 0 with probability p, and otherwise divided by the probability to be kept.

    On a CPU torch draws one number per value, which takes longer than the rest, and keeps a factor of the values' type
    for each. Here four values share 64 random bits, which round p to the nearest 1 / 65536, and a byte is kept; the
    divisor is the rounded probability, so that the mean is exact. Elsewhere, and for a compiler, torch's own.

    Args:
        values: any shape.
        p: in [0, 1).
    """
    if p == 0.0:
        return values
    if not _draws_own_numbers(values, p):
        return F.dropout(values, p)
    return _dropped(values, *_draw(values, p))


def dropout_matmul(weights: Tensor, values: Tensor, p: float) -> Tensor:
    """dropout(weights, p) @ values, which makes the dropped weights anew in the backward pass instead of keeping them.

    Args:
        weights: [..., T, S].
        values: [..., S, D], of the same type.
        p: in [0, 1).

    Returns:
        [..., T, D]
    """
    if p == 0.0 or not _draws_own_numbers(weights, p):
        return dropout(weights, p) @ values
    product: Tensor = _DropoutMatmul.apply(weights, values.contiguous(), *_draw(weights, p))
    return product


class _DropoutMatmul(torch.autograd.Function):
    """(weights, values, kept, scale) -> _dropped(weights, kept, scale) @ values"""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, kept: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(weights, values, kept)
        ctx.scale = scale
        return _dropped(weights, kept, scale) @ values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        weights, values, kept = ctx.saved_tensors
        grad = grad.to(values.dtype).contiguous()  # autocast's type, where the values have another
        grad_values = _dropped(weights, kept, ctx.scale).mT @ grad
        return _dropped(grad @ values.mT, kept, ctx.scale), grad_values, None, None


def _draws_own_numbers(values: Tensor, p: float) -> bool:
    """Whether the random bits are drawn here, and not by torch's dropout."""
    plain = values.device.type == "cpu" and type(values) is Tensor and not torch.compiler.is_compiling()
    return plain and round((1.0 - p) * _STEPS) > 0


def _draw(values: Tensor, p: float) -> tuple[Tensor, float]:
    """Which values are kept, bool of their shape, and the factor on these in the values' type."""
    steps, count = round((1.0 - p) * _STEPS), values.numel()
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    numbers = words.view(torch.int16)[:count].view(values.shape)  # evenly from -32768 to 32767
    return numbers < steps - _STEPS // 2, torch.tensor(_STEPS / steps, dtype=values.dtype).item()


def _dropped(values: Tensor, kept: Tensor, scale: float) -> Tensor:
    """Operators of which autograd keeps `kept` alone."""
    return torch.where(kept, values, 0.0).mul_(scale)


def drop_samples(values: Tensor, p: float) -> Tensor:
    """All values of a sample are 0 with probability p, and otherwise divided by the probability to be kept.

    One number a sample is drawn from torch's default generator, which tensor parallel ranks have in common.

    Args:
        values: [B, ...].
        p: in [0, 1).
    """
    numbers = torch.rand(values.size(0), *(1,) * (values.dim() - 1), device=values.device)
    return values * ((numbers >= p) / (1.0 - p)).to(values.dtype)
