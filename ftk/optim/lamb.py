"""LAMB: Adam's step, scaled for each matrix to the norm of its weights; for very large batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.norms import norms
from ftk.optim.base import OptimizerConfig, not_negative, two_betas
from ftk.optim.foreach import ForeachOptimizer, State, bias_corrections
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class LambConfig(OptimizerConfig):
    """Options of LAMB; betas and eps are the paper's for BERT."""

    lr: float = field(default=2e-3, metadata={"help": "peak learning rate; the schedule scales it"})
    weight_decay: float = field(
        default=0.01, metadata={"help": "decoupled weight decay; biases and norms are never decayed"}
    )
    betas: list[float] = field(
        default_factory=lambda: [0.9, 0.999],
        metadata={"help": "decay rates of the running means of gradient and squared gradient"},
    )
    eps: float = field(default=1e-6, metadata={"help": "added to the denominator for stability"})
    always_adapt: bool = field(
        default=False,
        metadata={"help": "scale the steps of parameters without weight decay (biases, norms) too, as in the paper"},
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        yield from two_betas(self.betas)
        yield from not_negative(self, "eps")


@register_optimizer("lamb", config=LambConfig)
class Lamb(ForeachOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2).

        u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p
        p = p - lr |p| / |u| u          (the ratio is 1 where one of the norms is 0)

    Args:
        config: learning rate, betas, eps, weight decay, what is adapted.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: LambConfig, param_groups: list[dict[str, Any]]) -> None:
        defaults = {
            "lr": config.lr,
            "betas": tuple(config.betas),
            "eps": config.eps,
            "weight_decay": config.weight_decay,
            "always_adapt": config.always_adapt,
        }
        super().__init__(param_groups, defaults)

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        return {
            "step": torch.zeros((), device=parameter.device),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }

    def update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[State],
        wholes: list[Any],
    ) -> None:
        beta1, beta2 = group["betas"]
        steps = [state["step"] for state in states]
        means = [state["exp_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        torch._foreach_add_(steps, 1.0)
        torch._foreach_lerp_(means, gradients, 1.0 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - beta2)

        denominators = torch._foreach_div(squares, bias_corrections(steps, beta2))
        torch._foreach_sqrt_(denominators)
        torch._foreach_add_(denominators, group["eps"])
        directions = list(torch._foreach_div(means, bias_corrections(steps, beta1)))
        torch._foreach_div_(directions, denominators)
        if group["weight_decay"] != 0.0:
            torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        if group["weight_decay"] != 0.0 or group["always_adapt"]:
            torch._foreach_mul_(directions, _trust_ratios(parameters, directions, wholes))
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])


def _trust_ratios(parameters: list[Tensor], directions: list[Tensor], wholes: list[Any]) -> list[Tensor]:
    """|p| / |u| for each pair, 0-d; 1 where a norm is 0."""
    weights, steps = norms(parameters, wholes), norms(directions, wholes)
    return list(torch.where((weights > 0.0) & (steps > 0.0), weights / steps, 1.0).unbind())
