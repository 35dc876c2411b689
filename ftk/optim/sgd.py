"""Stochastic gradient descent with momentum, fused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ftk.model_parallel.shards import locals_of
from ftk.optim.base import OptimizerConfig, defaults_of
from ftk.optim.options import option
from ftk.registry import register_optimizer


@dataclass(kw_only=True)
class SGDConfig(OptimizerConfig):
    """Options of SGD."""

    weight_decay: float = option(
        0.0, "L2 penalty added to the gradient; biases and norms are never decayed", "[0, inf)"
    )
    momentum: float = option(0.0, "share of the last step that is kept, in [0, 1)", "[0, 1)")
    nesterov: bool = option(False, "Nesterov's momentum (needs momentum above 0)")

    @property
    def state_bytes(self) -> float:
        return 4.0 if self.momentum else 0.0

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.nesterov and self.momentum == 0.0:
            yield "nesterov is true; it needs a momentum above 0"


@register_optimizer("sgd", config=SGDConfig)
class SGD(torch.optim.SGD):
    """Gradient descent with momentum (Sutskever et al. 2013) and L2 penalty, one fused kernel per group.

    The kernel is called here, on this process's parts: torch has it for no DTensor. And torch allocates momentum
    uninitialised in the first step, which a first step that is skipped would leave so; zeros give the same numbers.

    Args:
        config: learning rate, momentum, weight decay.
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """

    def __init__(self, config: SGDConfig, param_groups: list[dict[str, Any]]) -> None:
        super().__init__(param_groups, **defaults_of(config), fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            of_kind: dict[Any, list[torch.Tensor]] = {}  # the kernel takes one device and one type
            for parameter in group["params"]:
                if parameter.grad is not None:
                    of_kind.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for parameters in of_kind.values():
                self._update(group, parameters)
        return loss

    def _update(self, group: dict[str, Any], parameters: list[torch.Tensor]) -> None:
        torch._fused_sgd_(
            locals_of(parameters),
            locals_of(parameter.grad for parameter in parameters),
            locals_of(map(self._momentum, parameters)) if group["momentum"] else [],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,  # the momenta are there, at zero
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
        )

    def _momentum(self, parameter: torch.Tensor) -> torch.Tensor:
        state = self.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum: torch.Tensor = state["momentum_buffer"]
        return momentum
