"""Warm-up, stable, decay: the rate stays at its peak until a last, short decay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ftk.errors import UserError
from ftk.optim.lr_schedulers.base import DecayConfig, DecayingScheduler, known
from ftk.optim.lr_schedulers.shapes import SHAPES
from ftk.registry import register_lr_scheduler


@dataclass(kw_only=True)
class WarmupStableDecayConfig(DecayConfig):
    """Options of warm-up-stable-decay."""

    decay_updates: int = field(
        default=0,
        metadata={"help": "updates of the decay at the end of the run; 0: --decay-ratio says it", "unit": "updates"},
    )
    decay_ratio: float = field(default=0.1, metadata={"help": "the decay as a share of the run, in (0, 1]"})
    decay_shape: str = field(default="linear", metadata={"help": "form of the decay", "choices": tuple(SHAPES)})

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not 0.0 < self.decay_ratio <= 1.0:
            yield f"decay_ratio is {self.decay_ratio}; it must be in (0, 1]"


@register_lr_scheduler("warmup_stable_decay", config=WarmupStableDecayConfig)
class WarmupStableDecay(DecayingScheduler):
    """Constant after the warm-up, then a decay to the floor at the end (MiniCPM: Hu et al. 2024,
    https://arxiv.org/abs/2404.06395).

    While the rate is constant the length of the run has no influence: a run may be continued with a larger
    --max-update, and its checkpoints may be decayed on their own.

    Raises:
        UserError: warm-up and decay are longer than the run.
    """

    def __init__(self, config: WarmupStableDecayConfig, *, base_lr: float, total_updates: int | None = None) -> None:
        super().__init__(config, base_lr=base_lr, total_updates=total_updates)
        total = known(total_updates, "warmup_stable_decay")
        self.decay_updates = config.decay_updates or max(1, round(config.decay_ratio * total))
        self.stable_updates = total - self.warmup_updates - self.decay_updates
        self.shape = SHAPES[config.decay_shape]
        if self.stable_updates < 0:
            raise UserError(
                f"lr_scheduler: a warm-up of {self.warmup_updates} and a decay of {self.decay_updates} updates do not "
                f"fit into the run's {total}; shorten one of them, or raise --max-update"
            )

    def decayed(self, num_decayed: int) -> float:
        return super().decayed(max(0, num_decayed - self.stable_updates))

    def remaining(self, progress: float) -> float:
        return self.shape(progress)
