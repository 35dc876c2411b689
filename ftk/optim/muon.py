"""Muon: momentum whose matrices are made orthogonal; AdamW for everything that is no hidden matrix."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.shards import own_part, whole
from ftk.optim.adamw import AdamW, AdamWConfig
from ftk.optim.base import set_lr
from ftk.optim.foreach import ForeachOptimizer, State
from ftk.optim.joined import JoinedOptimizer
from ftk.optim.patterns import matches
from ftk.registry import register_optimizer

# Jordan's: the slope at 0 is as steep as it gets while singular values end up between 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


@dataclass(kw_only=True)
class MuonConfig(AdamWConfig):
    """Options of Muon; betas and eps are those of its AdamW."""

    lr: float = field(
        default=1e-3, metadata={"help": "peak learning rate of the hidden matrices; the schedule scales it"}
    )
    momentum: float = field(default=0.95, metadata={"help": "decay rate of the mean of gradients, in [0, 1)"})
    nesterov: bool = field(default=True, metadata={"help": "look one step ahead, as Nesterov's momentum does"})
    ns_steps: int = field(
        default=5,
        metadata={"max": 100, "help": "Newton-Schulz iterations that make a step orthogonal", "unit": "iterations"},
    )
    muon_scale: str = field(
        default="match_rms_adamw",
        metadata={
            "help": "size of a step of an N x M matrix: 0.2 sqrt(max(N, M)), as large as AdamW's, so that rates and "
            "decays for AdamW are good here; or sqrt(max(1, N / M)), for which rates are about 0.02",
            "choices": ("match_rms_adamw", "original"),
        },
    )
    adamw_params: list[str] = field(
        default_factory=lambda: ["*embed*", "*lm_head*", "*output_projection*"],
        metadata={"help": "matrices that AdamW updates, by name or by module; shell patterns", "metavar": "PATTERNS"},
    )
    adamw_lr_ratio: float = field(default=1.0, metadata={"help": "the rate of the AdamW part as a multiple of --lr"})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not 0.0 <= self.momentum < 1.0:
            yield f"momentum is {self.momentum}; it must be in [0, 1)"
        if self.ns_steps < 1:
            yield f"ns_steps is {self.ns_steps}; it must be 1 or more"
        if not self.adamw_lr_ratio > 0.0:
            yield f"adamw_lr_ratio is {self.adamw_lr_ratio}; it must be above 0"


@register_optimizer("muon", config=MuonConfig)
class Muon(JoinedOptimizer):
    """Momentum orthogonalized by Newton-Schulz (Jordan 2024, https://kellerjordan.github.io/posts/muon) for hidden
    matrices, AdamW for embeddings, biases and norms.

    A hidden matrix is a parameter of two dimensions whose name matches none of `adamw_params`.

    Args:
        config: learning rate and the rest.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` and `lr_scale` win. Without
            `names` every matrix is a hidden one.
    """

    def __init__(self, config: MuonConfig, param_groups: list[dict[str, Any]]) -> None:
        hidden, rest = [], []
        for group in param_groups:
            parameters = list(group["params"])
            names = group.get("names", [""] * len(parameters))
            chosen = [
                parameter.ndim == 2 and not any(matches(name, pattern) for pattern in config.adamw_params)
                for parameter, name in zip(parameters, names, strict=True)
            ]
            scale = group.get("lr_scale", 1.0)
            hidden.append(_part(group, chosen, scale))
            rest.append(_part(group, [not is_hidden for is_hidden in chosen], scale * config.adamw_lr_ratio))
        optimizers: list[torch.optim.Optimizer] = []
        if hidden := [group for group in hidden if group["params"]]:
            optimizers.append(NewtonSchulz(config, hidden))
        if rest := [group for group in rest if group["params"]]:
            optimizers.append(AdamW(config, rest))
        super().__init__(optimizers)
        set_lr(self, config.lr)


def _part(group: dict[str, Any], chosen: list[bool], lr_scale: float) -> dict[str, Any]:
    """A group of the chosen parameters alone."""
    part = {**group, "lr_scale": lr_scale}
    for key in ("params", "names"):
        if key in group:
            part[key] = [value for value, take in zip(group[key], chosen, strict=True) if take]
    return part


class NewtonSchulz(ForeachOptimizer):
    """Muon's update; every parameter is a matrix [N, M].

        m = momentum m + (1 - momentum) g
        u = momentum m + (1 - momentum) g, or m without nesterov
        p = p - lr (scale orthogonal(u) + decay p)

    Equal to `torch.optim.Muon`, which knows no `found_inf`; matrices of one shape are multiplied in one call.

    Args:
        config: learning rate and the rest.
        param_groups: of matrices.
    """

    def __init__(self, config: MuonConfig, param_groups: list[dict[str, Any]]) -> None:
        defaults = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "momentum": config.momentum,
            "nesterov": config.nesterov,
            "ns_steps": config.ns_steps,
            "muon_scale": config.muon_scale,
        }
        super().__init__(param_groups, defaults)

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {"momentum_buffer": torch.zeros_like(parameter)}

    def update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[State],
        wholes: list[Any],
    ) -> None:
        buffers = [state["momentum_buffer"] for state in states]
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
            parts = [own_part(value, wholes[place]) for value, place in zip(orthogonal.unbind(), places, strict=True)]
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
