"""The exponential schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.optim.lr_schedulers.base import DecayConfig, LRScheduler, decay_length
from ftk.registry import register_lr_scheduler


@dataclass(kw_only=True)
class ExponentialConfig(DecayConfig):
    """Options of the exponential schedule."""

    decay_rate: float = field(
        default=0.1,
        metadata={"help": "factor by which the rate has fallen after --decay-updates updates, in (0, 1]"},
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not 0.0 < self.decay_rate <= 1.0:
            yield f"decay_rate is {self.decay_rate}; it must be in (0, 1]"


@register_lr_scheduler("exponential", config=ExponentialConfig)
class Exponential(LRScheduler):
    """base_lr * decay_rate ** (updates after the warm-up / decay_updates), on and on down to the floor."""

    def __init__(self, config: ExponentialConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.decay_updates = decay_length(config, self.warmup_updates, total_updates)
        self.decay_rate = config.decay_rate

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * self.decay_rate ** (num_decayed / self.decay_updates)
