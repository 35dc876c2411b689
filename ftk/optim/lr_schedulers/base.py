"""What every schedule shares: the warm-up, the floor, and what the trainer calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ftk.errors import UserError


@dataclass(kw_only=True)
class LRSchedulerConfig:
    """Options of every schedule."""

    warmup_updates: int = field(
        default=0, metadata={"help": "the rate rises linearly over this many updates", "unit": "updates"}
    )
    warmup_ratio: float = field(
        default=0.0,
        metadata={"help": "warm-up as a share of the whole run; instead of --warmup-updates"},
    )
    warmup_init_lr: float = field(default=0.0, metadata={"help": "rate from which the warm-up rises"})
    min_lr: float = field(default=0.0, metadata={"help": "floor of the rate after the warm-up"})
    min_lr_ratio: float = field(default=0.0, metadata={"help": "floor as a share of --lr; instead of --min-lr"})

    def validate(self) -> Iterator[str]:
        for name in ("warmup_updates", "warmup_init_lr", "min_lr"):
            if not getattr(self, name) >= 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"
        if not 0.0 <= self.warmup_ratio < 1.0:
            yield f"warmup_ratio is {self.warmup_ratio}; it must be in [0, 1)"
        if not 0.0 <= self.min_lr_ratio <= 1.0:
            yield f"min_lr_ratio is {self.min_lr_ratio}; it must be in [0, 1]"
        if self.warmup_updates and self.warmup_ratio:
            given = f"warmup_updates is {self.warmup_updates}, warmup_ratio {self.warmup_ratio}"
            yield f"{given}; give one of them"
        if self.min_lr and self.min_lr_ratio:
            yield f"min_lr is {self.min_lr} and min_lr_ratio {self.min_lr_ratio}; give one of them"


@dataclass(kw_only=True)
class DecayConfig(LRSchedulerConfig):
    """Options of the schedules that decay over a given number of updates."""

    decay_updates: int = field(
        default=0,
        metadata={
            "help": "updates that the decay takes after the warm-up; 0: the rest of the run",
            "unit": "updates",
        },
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.decay_updates < 0:
            yield f"decay_updates is {self.decay_updates}; it must be 0 or more"


class LRScheduler(ABC):
    """A linear warm-up to `base_lr`, then what `decayed` says, never below the floor.

    With W warm-up updates, the n-th update done before (n from 0) has

        lr(n) = init + (base - init) * (n + 1) / W     for n < W   (so no update is spent at a rate of 0)
        lr(n) = max(floor, decayed(n - W))             for n >= W

    Args:
        config: the schedule's options.
        base_lr: the peak, `--lr`.
        total_updates: length of the run where it is known.

    Raises:
        UserError: the schedule needs the length of the run, and there is none.
    """

    def __init__(self, config: LRSchedulerConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        self.base_lr = base_lr
        self.floor = config.min_lr_ratio * base_lr if config.min_lr_ratio else config.min_lr
        self.warmup_init_lr = config.warmup_init_lr
        self.warmup_updates = config.warmup_updates
        if config.warmup_ratio:
            self.warmup_updates = round(config.warmup_ratio * known(total_updates, "warmup_ratio"))

    def lr(self, num_updates: int) -> float:
        """The learning rate of the update that comes after `num_updates` updates."""
        if num_updates is not None and num_updates < self.warmup_updates:
            progress = self.rising((num_updates + 1) / self.warmup_updates)
            return self.warmup_init_lr + (self.base_lr - self.warmup_init_lr) * progress
        return max(self.floor, self.decayed(num_updates - self.warmup_updates))

    def has_fallen_to(self, lr: float, num_updates: int) -> bool:
        """Whether after `num_updates` updates the warm-up is over and the rate is `lr` or less."""
        return num_updates >= self.warmup_updates and self.lr(num_updates) <= lr * (1 + 1e-9)

    def rising(self, progress: float) -> float:
        """Share of the way from `warmup_init_lr` to the peak at `progress` of the warm-up in (0, 1]: linear."""
        return progress

    @abstractmethod
    def decayed(self, num_decayed: int) -> float:
        """The learning rate `num_decayed` updates after the warm-up, before the floor is applied."""

    def observe(self, metric: float, *, num_updates: int | None = None, maximize: bool = False) -> None:  # noqa: B027 (optional)
        """Hears the validation metric after each validation; schedules that react to it remember it.

        Args:
            metric: what ranks checkpoints, `--best-metric`.
            num_updates: updates done before the validation; None if that is not known.
            maximize: whether larger is better, `--maximize-best-metric`.
        """

    def state_dict(self) -> dict[str, Any]:
        """What the schedule remembers, JSON-able; nothing for a pure function of the number of updates."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 (optional)
        """Takes back what `state_dict` gave."""


class DecayingScheduler(LRScheduler):
    """A schedule that goes from `base_lr` to the floor in `decay_updates` updates after the warm-up."""

    def __init__(self, config: DecayConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.decay_updates = decay_length(config, self.warmup_updates, total_updates)

    def decayed(self, num_decayed: int) -> float:
        remaining = self.remaining(min(1.0, num_decayed / self.decay_updates))
        return self.floor + (self.base_lr - self.floor) * remaining

    @abstractmethod
    def remaining(self, progress: float) -> float:
        """Share of the way from the floor to the peak that is left at `progress` in [0, 1]: from 1 to 0."""


def decay_length(config: DecayConfig, warmup_updates: int, total_updates: int | None) -> int:
    """Updates that a decay takes: those of the options, or the rest of the run after the warm-up."""
    return config.decay_updates or max(1, known(total_updates, "a decay") - warmup_updates)


def known(total_updates: int | None, what: str) -> int:
    """The length of the run, which `what` needs."""
    if total_updates is None:
        raise UserError(
            f"lr_scheduler: {what} needs the length of the run; give --max-update or --max-epoch, or the "
            f"numbers of updates themselves (--warmup-updates, --decay-updates)"
        )
    return total_updates
