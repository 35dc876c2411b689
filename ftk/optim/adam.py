"""Adam with coupled weight decay, fused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ftk.optim.base import OptimizerConfig, not_negative, two_betas
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    """Options of Adam; the defaults are the paper's."""

    weight_decay: float = field(
        default=0.0, metadata={"help": "L2 penalty added to the gradient; biases and norms are never decayed"}
    )
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata={"help": "decay rates of the running means of gradient and squared gradient"},
    )
    eps: float = field(default=1e-8, metadata={"help": "added to the denominator for stability"})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        yield from two_betas(self.betas)
        yield from not_negative(self, "eps")


@register_optimizer("adam", config=AdamConfig)
class Adam(torch.optim.Adam):
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980), one fused kernel per group.

    Weight decay is an L2 penalty and so passes through the running means; `adamw` decays the weights themselves.

    Args:
        config: learning rate, betas, eps, weight decay.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: AdamConfig, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(
            param_groups,
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
