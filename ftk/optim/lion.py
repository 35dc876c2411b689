"""Lion: steps of one size, in the direction of the sign of the momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftk.optim.base import OptimizerConfig
from ftk.optim.foreach import Chunk, ForeachOptimizer, State
from ftk.optim.options import option
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class LionConfig(OptimizerConfig):
    """Options of Lion. Against AdamW take a rate 3 to 10 times smaller and a decay as much larger (sec. 5)."""

    weight_decay: float = option(1.0, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")
    betas: list[float] = option(
        [0.9, 0.99], "share of the momentum in the step's direction; decay rate of the momentum", "[0, 1)", count=2
    )

    @property
    def state_bytes(self) -> float:
        return 4.0


@register_optimizer("lion", config=LionConfig)
class Lion(ForeachOptimizer):
    """Evolved sign momentum (Chen et al. 2023, https://arxiv.org/abs/2302.06675, algorithm 2).

    c = b1 m + (1 - b1) g
    p = p - lr (sign(c) + decay p)
    m = b2 m + (1 - b2) g
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {"momentum": torch.zeros_like(parameter)}

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        beta1, beta2 = group["betas"]
        momenta = chunk.entries("momentum")
        directions = torch._foreach_lerp(momenta, chunk.gradients, 1.0 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_mul_(chunk.parameters, 1.0 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(chunk.parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(momenta, chunk.gradients, 1.0 - beta2)
