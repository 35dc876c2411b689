"""The one-cycle schedule: up to a high rate, down again, and far below the start."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.errors import UserError
from ftk.optim.lr_schedulers.base import DecayConfig, LRScheduler, decay_length
from ftk.optim.lr_schedulers.shapes import SHAPES
from ftk.registry import register_lr_scheduler

DEFAULT_RISE = 0.3  # of the run, as in torch.optim.lr_scheduler.OneCycleLR


@dataclass(kw_only=True)
class OneCycleConfig(DecayConfig):
    """Options of one-cycle."""

    warmup_ratio: float = field(
        default=0.0,
        metadata={
            "help": f"the rise as a share of the run; if neither it nor --warmup-updates is given: {DEFAULT_RISE}"
        },
    )
    div_factor: float = field(
        default=25.0, metadata={"help": "the rise begins at --lr divided by this, unless --warmup-init-lr says where"}
    )
    final_div_factor: float = field(
        default=1e4,
        metadata={"help": "the fall ends at the beginning's rate divided by this, unless --min-lr(-ratio) says where"},
    )
    three_phase: bool = field(
        default=False,
        metadata={"help": "fall back to the beginning's rate as fast as it rose, and from there to the end"},
    )
    anneal: str = field(default="cosine", metadata={"help": "form of rise and fall", "choices": ("cosine", "linear")})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        for name in ("div_factor", "final_div_factor"):
            if not getattr(self, name) >= 1.0:
                yield f"{name} is {getattr(self, name)}; it must be 1 or more"


@register_lr_scheduler("one_cycle", config=OneCycleConfig)
class OneCycle(LRScheduler):
    """One cycle (Smith 2018, https://arxiv.org/abs/1803.09820; the options are those of torch's OneCycleLR).

    From base / div_factor to base in the warm-up; then down to base / (div_factor * final_div_factor), with
    `three_phase` by way of base / div_factor. The paper's cycle of the momentum is left out.

    Raises:
        UserError: with `three_phase`, the fall is not longer than the rise.
    """

    def __init__(self, config: OneCycleConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        if not config.warmup_updates and not config.warmup_ratio:
            config = dataclasses.replace(config, warmup_ratio=DEFAULT_RISE)
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.warmup_init_lr = config.warmup_init_lr or base_lr / config.div_factor
        self.floor = self.floor or self.warmup_init_lr / config.final_div_factor
        self.decay_updates = decay_length(config, self.warmup_updates, total_updates)
        self.shape = SHAPES[config.anneal]
        self.three_phase = config.three_phase
        if self.three_phase and self.decay_updates <= self.warmup_updates:
            raise UserError(
                f"lr_scheduler: the fall of {self.decay_updates} updates must be longer than the rise of "
                f"{self.warmup_updates} with three_phase; give a smaller --warmup-ratio"
            )

    def rising(self, progress: float) -> float:
        return 1.0 - self.shape(progress)

    def decayed(self, num_decayed: int) -> float:
        start, high, low, length = 0, self.base_lr, self.floor, self.decay_updates
        if self.three_phase and num_decayed < self.warmup_updates:
            low, length = self.warmup_init_lr, self.warmup_updates
        elif self.three_phase:
            start, high = self.warmup_updates, self.warmup_init_lr
        return low + (high - low) * self.shape(min(1.0, (num_decayed - start) / (length - start)))
