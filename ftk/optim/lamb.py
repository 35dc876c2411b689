"""LAMB: Adam's step, scaled for each matrix to the norm of its weights; for very large batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.norms import norms
from ftk.optim.base import OptimizerConfig, two_betas
from ftk.optim.foreach import Chunk, ForeachOptimizer, State, bias_corrections
from ftk.optim.options import option
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class LambConfig(OptimizerConfig):
    """Options of LAMB; betas and eps are the paper's for BERT."""

    lr: float = option(2e-3, "peak learning rate; the schedule scales it", "[0, inf)")
    weight_decay: float = option(0.01, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")
    betas: list[float] = two_betas(0.9, 0.999)
    eps: float = option(1e-6, "added to the denominator for stability", "[0, inf)")
    always_adapt: bool = option(
        False, "scale the steps of parameters without weight decay (biases, norms) too, as in the paper"
    )


@register_optimizer("lamb", config=LambConfig)
class Lamb(ForeachOptimizer):
    """Layer-wise adaptive moments (You et al. 2020, https://arxiv.org/abs/1904.00962, algorithm 2).

    u = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay p
    p = p - lr |p| / |u| u          (the ratio is 1 where one of the norms is 0)
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.zeros((), device=parameter.device), **moments}

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        parameters, gradients, (beta1, beta2) = chunk.parameters, chunk.gradients, group["betas"]
        steps, means, squares = (chunk.entries(name) for name in ("step", "exp_avg", "exp_avg_sq"))
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
            torch._foreach_mul_(directions, _trust_ratios(parameters, directions, chunk.wholes))
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])


def _trust_ratios(parameters: list[Tensor], directions: list[Tensor], wholes: list[Any]) -> list[Tensor]:
    """|p| / |u| for each pair, 0-d; 1 where a norm is 0."""
    weights, steps = norms(parameters, wholes), norms(directions, wholes)
    return list(torch.where((weights > 0.0) & (steps > 0.0), weights / steps, 1.0).unbind())
