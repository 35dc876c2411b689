"""Adafactor: the second moment of a matrix kept as one row and one column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.norms import norms
from ftk.model_parallel.shards import is_distributed, sum_over_dimension
from ftk.optim.base import OptimizerConfig
from ftk.optim.foreach import Chunk, ForeachOptimizer, State
from ftk.optim.options import option
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Options of Adafactor; with the defaults and a constant schedule it is algorithm 4 of the paper."""

    lr: float = option(1e-2, "peak learning rate; relative to the weights, see below", "[0, inf)")
    weight_decay: float = option(0.0, "decoupled weight decay; biases and norms are never decayed", "[0, inf)")
    relative_step: bool = option(True, "the rate of update t is at most 1 / sqrt(t)")
    scale_parameter: bool = option(True, "the rate is multiplied by the root mean square of the parameter")
    clip_threshold: float = option(
        1.0, "steps are scaled down to this root mean square before the rate is applied", "(0, inf)"
    )
    beta2_decay: float = option(
        -0.8, "the decay rate of the second moment at update t is 1 - t ** this; below 0", "(-inf, 0)"
    )
    beta1: float = option(0.0, "decay rate of the running mean of the steps; 0: no such mean is kept", "[0, 1)")
    eps: list[float] = option(
        [1e-30, 1e-3], "added to squared gradients; floor of a parameter's root mean square", "(0, inf)", count=2
    )

    @property
    def state_bytes(self) -> float:
        return 4.0 if self.beta1 else 0.0  # rows and columns are next to nothing


@register_optimizer("adafactor", config=AdafactorConfig)
class Adafactor(ForeachOptimizer):
    """Adaptive rates with sublinear memory (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235).

    `torch.optim.Adafactor` reads the step count and every norm on the host, knows no `found_inf`, and applies
    the first epsilon elsewhere than the paper does.
    """

    def new_state(self, parameter: Tensor, group: dict[str, Any]) -> State:
        state = {"step": torch.zeros((), device=parameter.device)}
        if parameter.ndim >= 2:
            state["row"] = torch.zeros_like(parameter[..., :1])  # [..., N, 1]
            state["column"] = torch.zeros_like(parameter[..., :1, :])  # [..., 1, M]
        else:
            state["square"] = torch.zeros_like(parameter)
        if group["beta1"] > 0.0:
            state["exp_avg"] = torch.zeros_like(parameter)
        return state

    def update(self, group: dict[str, Any], chunk: Chunk) -> None:
        # One parameter after another: what is temporary is then one matrix, which is why one takes Adafactor.
        for parameter, gradient, state, whole in zip(*chunk, strict=True):
            _update_one(group, parameter, gradient, state, whole)


def _update_one(group: dict[str, Any], parameter: Tensor, gradient: Tensor, state: State, whole: Any) -> None:
    """`whole` is what the parameter is a part of; means are over it."""
    step = state["step"].add_(1.0)
    direction = _direction(gradient, state, step.pow(group["beta2_decay"]), group["eps"][0], whole)
    rate: Any = group["lr"]
    if group["relative_step"]:
        rate = step.rsqrt().clamp(max=rate)
    decay = rate * group["weight_decay"]
    if group["scale_parameter"]:
        rate = rate * _root_mean_square(parameter, whole).clamp(min=group["eps"][1])
    # The clipped direction times the rate, in one pass.
    direction *= rate / (_root_mean_square(direction, whole) / group["clip_threshold"]).clamp(min=1.0)
    if group["beta1"] > 0.0:
        direction = state["exp_avg"].lerp_(direction, 1.0 - group["beta1"])
    if group["weight_decay"] != 0.0:
        parameter.mul_(1.0 - decay)
    parameter.sub_(direction)


def _direction(gradient: Tensor, state: State, weight: Tensor, eps: float, whole: Any) -> Tensor:
    """The gradient over the root of its second moment, which takes in the new square with `weight`, 0-d."""
    if "square" in state:
        return gradient * state["square"].lerp_(gradient.square().add_(eps), weight).rsqrt()
    row = state["row"].lerp_(_mean_square(gradient, -1, whole).add_(eps), weight)
    column = state["column"].lerp_(_mean_square(gradient, -2, whole).add_(eps), weight)
    # Algorithm 4 has R C / sum(R) of sums; with means it is R C / mean(R).
    mean = row.mean(-2, keepdim=True)
    if is_distributed(whole):
        mean = sum_over_dimension(row.sum(-2, keepdim=True), whole, -2) / whole.shape[-2]
    return (gradient * (row / mean).rsqrt_()).mul_(column.rsqrt())


def _mean_square(tensor: Tensor, dim: int, whole: Any) -> Tensor:
    """Over one dimension, which stays as one of size 1. By norms, so that no squares as large as `tensor` are made."""
    squares = torch.linalg.vector_norm(tensor, dim=dim, keepdim=True).square_()
    return sum_over_dimension(squares, whole, dim).div_(whole.shape[dim])


def _root_mean_square(tensor: Tensor, whole: Any) -> Tensor:
    return norms([tensor], [whole])[0] / math.sqrt(whole.numel())
