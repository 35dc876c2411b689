"""Stochastic gradient descent with momentum, fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ftk.model_parallel.shards import is_distributed, locals_of
from ftk.optim.base import OptimizerConfig
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """Options of SGD."""

    weight_decay: float = field(
        default=0.0, metadata={"help": "L2 penalty added to the gradient; biases and norms are never decayed"}
    )
    momentum: float = field(default=0.0, metadata={"help": "share of the last step that is kept, in [0, 1)"})
    nesterov: bool = field(default=False, metadata={"help": "Nesterov's momentum (needs momentum above 0)"})

    @property
    def state_bytes(self) -> float:
        return 4.0 if self.momentum else 0.0

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not 0.0 <= self.momentum < 1.0:
            yield f"momentum is {self.momentum}; it must be in [0, 1)"
        if self.nesterov and self.momentum == 0.0:
            yield "nesterov is true; it needs a momentum above 0"


@register_optimizer("sgd", config=SGDConfig)
class SGD(torch.optim.SGD):
    """Gradient descent with momentum (Sutskever et al. 2013) and L2 penalty, one fused kernel per group.

    Args:
        config: learning rate, momentum, weight decay.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: SGDConfig, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(
            param_groups,
            lr=config.lr,
            momentum=config.momentum,
            nesterov=config.nesterov,
            weight_decay=config.weight_decay,
            fused=True,
        )

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._start_momentum_at_zero()
        distributed = any(is_distributed(parameter) for group in self.param_groups for parameter in group["params"])
        return self._step_of_parts() if distributed and closure is None else super().step(closure)

    @torch.no_grad()
    def _step_of_parts(self) -> None:
        """The fused kernel on this process's parts: torch has it for no DTensor."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            momentum = group["momentum"] != 0.0
            torch._fused_sgd_(
                locals_of(parameters),
                locals_of(parameter.grad for parameter in parameters),
                locals_of(self.state[parameter]["momentum_buffer"] for parameter in parameters) if momentum else [],
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=False,
                is_first_step=False,  # the buffers are there, at zero
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )

    def _start_momentum_at_zero(self) -> None:
        # torch's fused step allocates the buffers uninitialised and fills them in the first step; a first
        # step that is skipped would leave them as they were found. Zeros give the same numbers.
        for group in self.param_groups:
            if group["momentum"] == 0.0:
                continue
            for parameter in group["params"]:
                if parameter.grad is not None and self.state[parameter].get("momentum_buffer") is None:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
