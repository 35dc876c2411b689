"""Options of the moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class EMAConfig:
    """Whether an exponential moving average of the weights is kept, and how long it remembers."""

    ema_decay: float = field(
        default=0.0,
        metadata={"help": "keep a moving average of the weights: average = decay * average + rest * weights; 0: none"},
    )
    ema_start_update: int = field(
        default=0, metadata={"help": "until so many updates the average is the weights themselves", "unit": "updates"}
    )
    ema_warmup: bool = field(
        default=True,
        metadata={"help": "the decay is at most (1 + n) / (10 + n) n updates after the start, so that it begins short"},
    )
    ema_interval: int = field(
        default=1, metadata={"help": "take the weights in every so many updates", "unit": "updates"}
    )

    def validate(self) -> Iterator[str]:
        if not 0.0 <= self.ema_decay < 1.0:
            yield f"ema_decay is {self.ema_decay}; it must be in [0, 1)"
        if self.ema_start_update < 0:
            yield f"ema_start_update is {self.ema_start_update}; it must be 0 or more"
        if self.ema_interval < 1:
            yield f"ema_interval is {self.ema_interval}; it must be 1 or more"

        if not self.ema_decay and (self.ema_start_update > 0 or self.ema_interval > 1):
            yield "ema_start_update and ema_interval go with --ema-decay: ema_decay is 0, so that no average is kept"

    def decay_at(self, num_updates: int) -> float:
        """The decay of the average after `num_updates` updates, at least 1."""
        since = num_updates - self.ema_start_update
        if since <= 0:
            return 0.0
        return min(self.ema_decay, (1 + since) / (10 + since)) if self.ema_warmup else self.ema_decay
