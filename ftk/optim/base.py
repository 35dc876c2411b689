"""What every optimizer shares: its options, and a step that can be skipped without asking the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(kw_only=True)
class OptimizerConfig:
    """Options of every optimizer."""

    lr: float = field(default=1e-4, metadata={"help": "peak learning rate; the schedule scales it"})
    weight_decay: float = field(
        default=0.1, metadata={"help": "decoupled weight decay; biases and norms are never decayed"}
    )

    @property
    def state_bytes(self) -> float:
        """About what the optimizer keeps of a parameter beside its weight and gradient: here two moments in fp32."""
        return 8.0

    def validate(self) -> Iterator[str]:
        yield from not_negative(self, "lr", "weight_decay")


def not_negative(config: OptimizerConfig, *names: str) -> Iterator[str]:
    """A message for each of the named options that is below 0 or no number."""
    for name in names:
        if not getattr(config, name) >= 0.0:
            yield f"{name} is {getattr(config, name)}; it must be 0 or more"


def two_betas(betas: Sequence[float]) -> Iterator[str]:
    """A message unless the option `betas` is two decay rates."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        yield f"betas is {betas}; it must be two numbers in [0, 1)"


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


def set_lr(optimizer: torch.optim.Optimizer, lr: float, own: Mapping[str, float] | None = None) -> None:
    """Give every group its learning rate.

    Args:
        optimizer: its groups may have `lr_scale`, a factor, and `schedule`, the name of a schedule of their own.
        lr: the rate of groups without a schedule of their own.
        own: rates of the groups that have one, by its name (see `ftk.optim.group_schedules`).
    """
    for group in optimizer.param_groups:
        rate = own[group["schedule"]] if own and group.get("schedule") else lr
        group["lr"] = rate * group.get("lr_scale", 1.0)
