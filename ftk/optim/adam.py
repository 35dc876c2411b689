"""Adam and AdamW, fused: one kernel per group, which also skips a step on the device (`ftk.optim.base.step_unless`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ftk.optim.base import OptimizerConfig, defaults_of, two_betas
from ftk.optim.options import option
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class AdamWConfig(OptimizerConfig):
    """Options of AdamW; the defaults are those of large language models (decay 0.1, a second beta of 0.98)."""

    betas: list[float] = two_betas(0.9, 0.98)
    eps: float = option(1e-6, "added to the denominator for stability", "[0, inf)")


@register_optimizer("adamw", config=AdamWConfig)
class AdamW(torch.optim.AdamW):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019).

    Args:
        config: learning rate, betas, eps, weight decay.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: AdamWConfig, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, **defaults_of(config), fused=True)


@dataclass(kw_only=True)
class AdamConfig(OptimizerConfig):
    """Options of Adam; the defaults are the paper's."""

    weight_decay: float = option(
        0.0, "L2 penalty added to the gradient; biases and norms are never decayed", "[0, inf)"
    )
    betas: list[float] = two_betas(0.9, 0.999)
    eps: float = option(1e-8, "added to the denominator for stability", "[0, inf)")


@register_optimizer("adam", config=AdamConfig)
class Adam(torch.optim.Adam):
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980).

    Weight decay is an L2 penalty and so passes through the running means; `adamw` decays the weights themselves.

    Args:
        config: learning rate, betas, eps, weight decay.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: AdamConfig, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, **defaults_of(config), fused=True)
