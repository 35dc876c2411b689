"""Adafactor: the second moment of a matrix kept as one row and one column."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.norms import norms
from ftk.model_parallel.shards import is_distributed, sum_over_dimension
from ftk.optim.base import OptimizerConfig
from ftk.optim.foreach import ForeachOptimizer, State
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class AdafactorConfig(OptimizerConfig):
    """Options of Adafactor; with the defaults and a constant schedule it is algorithm 4 of the paper."""

    lr: float = field(default=1e-2, metadata={"help": "peak learning rate; relative to the weights, see below"})
    weight_decay: float = field(
        default=0.0, metadata={"help": "decoupled weight decay; biases and norms are never decayed"}
    )
    relative_step: bool = field(default=True, metadata={"help": "the rate of update t is at most 1 / sqrt(t)"})
    scale_parameter: bool = field(
        default=True, metadata={"help": "the rate is multiplied by the root mean square of the parameter"}
    )
    clip_threshold: float = field(
        default=1.0, metadata={"help": "steps are scaled down to this root mean square before the rate is applied"}
    )
    beta2_decay: float = field(
        default=-0.8, metadata={"help": "the decay rate of the second moment at update t is 1 - t ** this; below 0"}
    )
    beta1: float = field(
        default=0.0, metadata={"help": "decay rate of the running mean of the steps; 0: no such mean is kept"}
    )
    eps: list[float] = field(
        default_factory=lambda: [1e-30, 1e-3],
        metadata={"help": "added to squared gradients; floor of a parameter's root mean square"},
    )

    @property
    def state_bytes(self) -> float:
        return 4.0 if self.beta1 else 0.0  # rows and columns are next to nothing

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not self.clip_threshold > 0.0:
            yield f"clip_threshold is {self.clip_threshold}; it must be above 0"
        if not self.beta2_decay < 0.0:
            yield f"beta2_decay is {self.beta2_decay}; it must be below 0"
        if not 0.0 <= self.beta1 < 1.0:
            yield f"beta1 is {self.beta1}; it must be in [0, 1)"
        if len(self.eps) != 2 or not all(eps > 0.0 for eps in self.eps):
            yield f"eps is {self.eps}; it must be two numbers above 0"


@register_optimizer("adafactor", config=AdafactorConfig)
class Adafactor(ForeachOptimizer):
    """Adaptive rates with sublinear memory (Shazeer and Stern 2018, https://arxiv.org/abs/1804.04235).

    `torch.optim.Adafactor` reads the step count and every norm on the host, knows no `found_inf`, and applies
    the first epsilon elsewhere than the paper does.

    Args:
        config: learning rate and the rest.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: AdafactorConfig, param_groups: list[dict[str, Any]]) -> None:
        defaults = {
            "lr": config.lr,
            "weight_decay": config.weight_decay,
            "relative_step": config.relative_step,
            "scale_parameter": config.scale_parameter,
            "clip_threshold": config.clip_threshold,
            "beta2_decay": config.beta2_decay,
            "beta1": config.beta1,
            "eps": tuple(config.eps),
        }
        super().__init__(param_groups, defaults)

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

    def update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        states: list[State],
        wholes: list[Any],
    ) -> None:
        # One parameter after another: what is temporary is then one matrix, which is why one takes Adafactor.
        for parameter, gradient, state, whole in zip(parameters, gradients, states, wholes, strict=True):
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
