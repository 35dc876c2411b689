"""Schedules that fall from the peak to the floor in a given number of updates: linear, polynomial, cosine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.optim.lr_schedulers import shapes
from ftk.optim.lr_schedulers.base import DecayConfig, DecayingScheduler
from ftk.registry import register_lr_scheduler


@register_lr_scheduler("linear", config=DecayConfig)
class Linear(DecayingScheduler):
    """A straight line."""

    def remaining(self, progress: float) -> float:
        return shapes.linear(progress)


@register_lr_scheduler("cosine", config=DecayConfig)
class Cosine(DecayingScheduler):
    """Half a cosine wave, (1 + cos(pi * progress)) / 2 (Loshchilov and Hutter 2017, without restarts)."""

    def remaining(self, progress: float) -> float:
        return shapes.cosine(progress)


@dataclass(kw_only=True)
class PolynomialConfig(DecayConfig):
    """Options of the polynomial schedule."""

    power: float = field(default=1.0, metadata={"help": "exponent of (1 - progress), above 0"})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not self.power > 0.0:
            yield f"power is {self.power}; it must be above 0"


@register_lr_scheduler("polynomial", config=PolynomialConfig)
class Polynomial(DecayingScheduler):
    """(1 - progress) ** power."""

    def __init__(self, config: PolynomialConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.power = config.power

    def remaining(self, progress: float) -> float:
        return (1.0 - progress) ** self.power
