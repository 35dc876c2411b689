"""Schedules that fall with the square root of the number of updates: inverse_sqrt and noam."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.optim.lr_schedulers.base import LRScheduler, LRSchedulerConfig
from ftk.registry import register_lr_scheduler


@register_lr_scheduler("inverse_sqrt", config=LRSchedulerConfig)
class InverseSqrt(LRScheduler):
    """base_lr * sqrt(W / n) after W warm-up updates: the peak is `--lr` (as in fairseq)."""

    def decayed(self, num_decayed: int) -> float:
        start = max(1, self.warmup_updates)
        return self.base_lr * (start / max(start, num_decayed + self.warmup_updates)) ** 0.5


@dataclass(kw_only=True)
class NoamConfig(LRSchedulerConfig):
    """Options of noam."""

    model_size: int = field(default=512, metadata={"help": "d in the factor d^-0.5; 1 leaves the factor out"})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.model_size < 1:
            yield f"model_size is {self.model_size}; it must be 1 or more"
        if self.warmup_updates < 1 and not self.warmup_ratio:
            yield f"warmup_updates is {self.warmup_updates}; noam needs a warm-up, e.g. --warmup-updates 4000"
        if self.warmup_init_lr:
            yield f"warmup_init_lr is {self.warmup_init_lr}; the warm-up of noam always rises from 0"


@register_lr_scheduler("noam", config=NoamConfig)
class Noam(LRScheduler):
    """lr * d^-0.5 * min(s^-0.5, s * W^-1.5) at step s = n + 1 (Vaswani et al. 2017, eq. 3).

    Here `--lr` is a factor (2.0, say), not the peak; the peak is lr * (d * W)^-0.5.
    """

    def __init__(self, config: NoamConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.warmup_updates = max(1, self.warmup_updates)
        self.base_lr = base_lr * (config.model_size * self.warmup_updates) ** -0.5
        if config.min_lr_ratio:
            self.floor = config.min_lr_ratio * self.base_lr

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * (self.warmup_updates / (self.warmup_updates + num_decayed + 1)) ** 0.5
