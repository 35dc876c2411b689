"""What every optimizer shares: its options, and a step that can be skipped without asking the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass(kw_only=True)
class OptimizerConfig:
    """Options of every optimizer."""

    lr: float = field(default=1e-4, metadata={"help": "peak learning rate; the schedule scales it"})
    weight_decay: float = field(
        default=0.1, metadata={"help": "decoupled weight decay; biases and norms are never decayed"}
    )

    def validate(self) -> Iterator[str]:
        if not self.lr >= 0.0:
            yield f"lr is {self.lr}; it must be 0 or more"
        if not self.weight_decay >= 0.0:
            yield f"weight_decay is {self.weight_decay}; it must be 0 or more"


def step_unless(optimizer: torch.optim.Optimizer, skip: torch.Tensor) -> None:
    """Take one optimizer step, or leave parameters and optimizer state untouched where `skip` is true.

    Fused optimizers take the decision on the device (the same `found_inf` that `torch.amp.GradScaler`
    sets), so that the host never waits. An optimizer without that support (a plugin's, say) is asked on
    the host: free on CPU, one synchronisation per update on an accelerator.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        skip: 0-d bool tensor on the device of the gradients.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = None  # type: ignore[attr-defined]
        optimizer.found_inf = skip.to(torch.float32)  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
    elif not bool(skip):
        optimizer.step()


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Give every group the learning rate `lr`, times the group's own `lr_scale` where it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
