"""Shared by all optimizers: a step that can be skipped without a host wait, and the learning rate of groups."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftk.model_parallel.shards import multiply_gradients


def defaults_of(config: Any) -> dict[str, Any]:
    """Options as a `torch.optim.Optimizer` keeps them: lists as tuples."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


class SkippableOptimizer(torch.optim.Optimizer, ABC):
    """One that takes `grad_scale` and `found_inf` of `torch.amp.GradScaler` into account (see `step_unless`)."""

    _step_supports_amp_scaling = True

    @abstractmethod
    def update_parameters(self, found_inf: Tensor | None) -> None:
        """Take a step with the gradients as they are, unless `found_inf`, 0-d, is above 0."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take one step.

        Args:
            closure: computes the loss again, with gradients; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale: Tensor | None = getattr(self, "grad_scale", None)
        if grad_scale is not None:
            multiply_gradients((p for group in self.param_groups for p in group["params"]), grad_scale.reciprocal())
        self.update_parameters(getattr(self, "found_inf", None))
        return loss


def takes_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step_unless` may divide the gradients of this optimizer."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def step_unless(optimizer: torch.optim.Optimizer, skip: Tensor, grad_scale: Tensor | None = None) -> None:
    """Take one optimizer step, or leave parameters and optimizer state untouched where `skip` is true.

    Fused optimizers decide on the device (by the same `found_inf` that `torch.amp.GradScaler` sets), so that the host
    never waits. For an optimizer without that support (of a plugin, say) the decision is made on the host: free on a
    CPU, one synchronisation per update on an accelerator.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        skip: 0-d bool tensor on the device of the gradients.
        grad_scale: 0-d float32 there, which the optimizer divides the gradients by as it reads them; None: by nothing.
            Only where it `takes_scale`.
    """
    assert grad_scale is None or takes_scale(optimizer)
    if takes_scale(optimizer):
        optimizer.grad_scale = grad_scale  # type: ignore[attr-defined]
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(skip):
        optimizer.step()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate `lr`, times its `lr_scale` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
