"""A linear layer that keeps what its input is made of, and not the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ftk.modules.few_rows import FewRowsLinear
from ftk.modules.precision import matmul_dtype


def remade_linear(linear: nn.Module, make: Callable[..., Tensor], *parts: Tensor) -> Tensor:
    """linear(make(*parts)), which in float32 on a CPU makes the input anew in the backward pass instead of keeping it.

    The parts are kept in any case, for the gradient of `make`: of GELU and the layer behind it half is saved so.
    Values and gradients are the same to the bit. In bfloat16 products are so fast that a GELU more would take 1 to 3 %
    of a step.

    Args:
        linear: a layer; of another class than `nn.Linear` (or that of few rows), or with hooks, it is called as it is.
        make: of the parts the input, without random numbers.
        parts: [..., F] each.

    Returns:
        [..., H]
    """
    if not _remakes(linear, parts):
        return linear(make(*parts))  # type: ignore[no-any-return]
    output: Tensor = _RemadeLinear.apply(make, linear.weight, linear.bias, *parts)
    return output


class _RemadeLinear(torch.autograd.Function):
    """(make, weight, bias, parts) -> F.linear(make(parts), weight, bias)"""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., Tensor], weight: Tensor, bias: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.make = make
        ctx.save_for_backward(weight, *parts)
        return F.linear(make(*parts), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        with torch.enable_grad():
            parts = [part.detach().requires_grad_() for part in kept]
            made = ctx.make(*parts)
        rows = grad.flatten(0, -2)
        grad_weight = rows.mT @ made.detach().flatten(0, -2)
        grad_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return None, grad_weight, grad_bias, *torch.autograd.grad(made, parts, grad @ weight)


def _remakes(linear: nn.Module, parts: tuple[Tensor, ...]) -> bool:
    """Whether the layer would keep its input, and nothing else has to see it."""
    if type(linear) not in (nn.Linear, FewRowsLinear) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    weight: Any = linear.weight
    hidden = parts[0]
    plain: bool = hidden.device.type == "cpu" and all(type(each) is Tensor for each in (weight.data, *parts))
    in_float32 = hidden.dtype == weight.dtype == matmul_dtype(hidden) == torch.float32
    hooks = linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks
    return plain and in_float32 and weight.requires_grad and not any(hooks)
