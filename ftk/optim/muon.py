"""Muon: momentum whose matrices are made orthogonal; AdamW for everything that is no hidden matrix."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.shards import local_part, whole
from ftk.name_patterns import matches
from ftk.optim.base import set_lr
from ftk.optim.foreach import Chunk, ForeachOptimizer, State
from ftk.optim.joined import JoinedOptimizer, split_by_member
from ftk.optim.optimizers import AdamWConfig, MuonConfig
from ftk.optim.torch_optim import adamw

# Jordan's: the slope at 0 is as steep as it gets while singular values end up between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(JoinedOptimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan 2024, https://kellerjordan.github.io/posts/muon) for hidden
    matrices, AdamW for embeddings, biases and norms.

    A hidden matrix is a parameter of two dimensions whose name matches none of `adamw_params`.

    Args:
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` and `lr_scale` win. Without
            `names` every matrix is a hidden one.
    """

    def __init__(self, config: MuonConfig, param_groups: list[dict[str, Any]]) -> None:
        def member_of(parameter: Tensor, name: str) -> int:
            return int(parameter.ndim != 2 or any(matches(name, pattern) for pattern in config.adamw_params))

        hidden, rest = split_by_member(param_groups, 2, member_of)
        for group in rest:
            group["lr_scale"] = group.get("lr_scale", 1.0) * config.adamw_lr_ratio
        of_rest = AdamWConfig(lr=config.lr, weight_decay=config.weight_decay, betas=config.betas, eps=config.eps)
        members = ((NewtonSchulz, config, hidden), (adamw, of_rest, rest))
        super().__init__([make(options, groups) for make, options, groups in members if groups])
        set_lr(self, config.lr)


class NewtonSchulz(ForeachOptimizer):
    """Muon's update; every parameter is a matrix [N, M].

        m = momentum m + (1 - momentum) g
        u = momentum m + (1 - momentum) g, or m without nesterov
        p = p - lr (scale orthogonal(u) + decay p)

    Equal to `torch.optim.Muon`, which multiplies sharded matrices in parts: with more collectives and, in bf16, results
    that are several times as far from those of one process. Here matrices of one shape are multiplied in one call.
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        parameters, gradients, wholes = chunk.parameters, chunk.gradients, chunk.wholes
        buffers = chunk.entries("momentum_buffer")
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        steps = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        by_shape: dict[torch.Size, list[int]] = {}
        for place, matrix in enumerate(wholes):
            by_shape.setdefault(matrix.shape, []).append(place)
        for shape, places in by_shape.items():
            # Every process that has a part of a matrix orthogonalizes all of it, and takes its part of the result.
            matrices = torch.stack([whole(steps[place], wholes[place]) for place in places])
            orthogonal = orthogonalized(matrices, group["ns_steps"])
            rate = group["lr"] * _scale(shape, group["muon_scale"])
            targets = [parameters[place] for place in places]
            parts = [local_part(value, wholes[place]) for value, place in zip(orthogonal.unbind(), places, strict=True)]
            torch._foreach_add_(targets, [part.to(targets[0].dtype) for part in parts], alpha=-rate)


def orthogonalized(matrices: Tensor, num_iterations: int) -> Tensor:
    """Matrices with nearly the same singular vectors, and singular values of about 1.

    The quintic iteration X = a X + (b A + c A A) X with A = X X^T, in bf16, whose error does not matter here.

    Args:
        matrices: [K, N, M]; computed in bf16, or in float64 if they are.
        num_iterations: 5 suffice.

    Returns:
        [K, N, M] in the type that it was computed in.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices if matrices.dtype == torch.float64 else matrices.bfloat16()
    x = x.mT if tall else x  # A is the smaller of the two products
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(num_iterations):
        gram = x @ x.mT  # A
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _scale(shape: torch.Size, rule: str) -> float:
    rows, columns = shape
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))  # Liu et al. 2025, https://arxiv.org/abs/2502.16982, eq. 4
