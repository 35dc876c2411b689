"""Lion: steps of one size, in the direction of the sign of the momentum."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftk.optim.base import OptimizerConfig, two_betas
from ftk.optim.foreach import ForeachOptimizer, State
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    """Options of Lion. Against AdamW take a rate 3 to 10 times smaller and a decay as much larger (sec. 5)."""

    weight_decay: float = field(
        default=1.0, metadata={"help": "decoupled weight decay; biases and norms are never decayed"}
    )
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.99],
        metadata={"help": "share of the momentum in the step's direction; decay rate of the momentum"},
    )

    @property
    def state_bytes(self) -> float:
        return 4.0

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        yield from two_betas(self.betas)


@register_optimizer("lion", config=LionConfig)
class Lion(ForeachOptimizer):
    """Evolved sign momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

        c = b1 m + (1 - b1) g
        p = p - lr (sign(c) + decay p)
        m = b2 m + (1 - b2) g

    Args:
        config: learning rate, betas, weight decay.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: LionConfig, param_groups: list[dict[str, Any]]) -> None:
        defaults = {"lr": config.lr, "betas": tuple(config.betas), "weight_decay": config.weight_decay}
        super().__init__(param_groups, defaults)

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {"momentum": torch.zeros_like(parameter)}

    def update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[State],
        wholes: list[Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        momenta = [state["momentum"] for state in states]
        directions = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, gradients, 1.0 - beta2)
