"""An optimizer: the sign of the averaged gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ftk.config.options import option
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class SignSGDConfig:
    lr: float = option(1e-3, "length of each step")
    weight_decay: float = option(0.0, "decoupled weight decay")
    beta: float = option(0.9, "decay of the gradient's running mean")


@register_optimizer("sign_sgd", config=SignSGDConfig)
class SignSGD(torch.optim.Optimizer):
    """p -= lr * (sign(mean of g) + weight_decay * p) (Bernstein et al. 2018)."""

    def __init__(self, config: SignSGDConfig, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, {"lr": config.lr, "beta": config.beta, "weight_decay": config.weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                mean = state.setdefault("mean", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 1.0 - group["beta"])
                parameter.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(mean.sign(), alpha=-group["lr"])
