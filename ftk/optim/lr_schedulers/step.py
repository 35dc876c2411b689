"""The step schedule: the rate drops by a factor, every so many updates or at given ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.optim.lr_schedulers.base import LRScheduler, LRSchedulerConfig
from ftk.registry import register_lr_scheduler


@dataclass(kw_only=True)
class StepConfig(LRSchedulerConfig):
    """Options of step."""

    step_updates: int = field(
        default=0, metadata={"help": "the rate drops every so many updates; instead of --milestones", "unit": "updates"}
    )
    milestones: list[int] = field(
        default_factory=list,
        metadata={"help": "the rate drops at these numbers of updates; instead of --step-updates", "unit": "updates"},
    )
    gamma: float = field(default=0.1, metadata={"help": "factor of each drop, in (0, 1]"})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.step_updates < 0:
            yield f"step_updates is {self.step_updates}; it must be 1 or more"
        elif bool(self.step_updates) == bool(self.milestones):
            given = f"step_updates is {self.step_updates} and milestones {self.milestones}"
            yield f"{given}; give one of them, --step-updates 10000 or --milestones 10000,15000"
        if any(low >= high for low, high in zip([0, *self.milestones], self.milestones)):  # noqa: B905 (shifted)
            yield f"milestones is {self.milestones}; it must be rising numbers above 0"
        if not 0.0 < self.gamma <= 1.0:
            yield f"gamma is {self.gamma}; it must be in (0, 1]"


@register_lr_scheduler("step", config=StepConfig)
class Step(LRScheduler):
    """base_lr * gamma ** (drops until now), all updates counted, those of the warm-up too."""

    def __init__(self, config: StepConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.step_updates, self.milestones, self.gamma = config.step_updates, config.milestones, config.gamma

    def decayed(self, num_decayed: int) -> float:
        done = self.warmup_updates + num_decayed
        drops = bisect_right(self.milestones, done) if self.milestones else done // self.step_updates
        return self.base_lr * self.gamma**drops
