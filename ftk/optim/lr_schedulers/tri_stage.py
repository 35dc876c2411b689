"""The tri-stage schedule: rise, hold, fall."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.optim.lr_schedulers.base import DecayConfig, LRScheduler, decay_length, known
from ftk.registry import register_lr_scheduler


@dataclass(kw_only=True)
class TriStageConfig(DecayConfig):
    """Options of tri-stage."""

    hold_updates: int = field(
        default=0, metadata={"help": "updates at the peak, between warm-up and decay", "unit": "updates"}
    )
    phase_ratio: list[float] = field(
        default_factory=list,
        metadata={
            "help": "shares of the run that warm-up, hold and decay take, e.g. 0.1,0.4,0.5; instead of their updates"
        },
    )
    final_lr_scale: float = field(
        default=0.01, metadata={"help": "rate at the end of the decay as a share of --lr, in (0, 1]"}
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.hold_updates < 0:
            yield f"hold_updates is {self.hold_updates}; it must be 0 or more"
        if not 0.0 < self.final_lr_scale <= 1.0:
            yield f"final_lr_scale is {self.final_lr_scale}; it must be in (0, 1]"
        if not self.phase_ratio:
            return
        ratios = self.phase_ratio
        if len(ratios) != 3 or not all(r >= 0.0 for r in ratios) or not abs(sum(ratios) - 1.0) < 1e-6:
            yield f"phase_ratio is {ratios}; it must be three shares that add up to 1"
        if self.warmup_updates or self.warmup_ratio or self.hold_updates or self.decay_updates:
            yield f"phase_ratio is {ratios}; give it or the lengths of warm-up, hold and decay"


@register_lr_scheduler("tri_stage", config=TriStageConfig)
class TriStage(LRScheduler):
    """Linear rise, constant, exponential fall to final_lr_scale * base_lr (fairseq's; Park et al. 2019 for speech)."""

    def __init__(self, config: TriStageConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        self.hold_updates = config.hold_updates
        if config.phase_ratio:
            total = known(total_updates, "phase_ratio")
            self.warmup_updates = round(config.phase_ratio[0] * total)
            self.hold_updates = round(config.phase_ratio[1] * total)
        self.decay_updates = decay_length(config, self.warmup_updates + self.hold_updates, total_updates)
        self.final_lr_scale = config.final_lr_scale

    def decayed(self, num_decayed: int) -> float:
        progress = (num_decayed - self.hold_updates) / self.decay_updates
        return self.base_lr * self.final_lr_scale ** min(1.0, max(0.0, progress))
