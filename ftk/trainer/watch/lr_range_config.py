"""Options of the learning rate range test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class LRRangeConfig:
    """A short run that shows which learning rates are too small, good, and too large."""

    lr_range_test: bool = field(
        default=False,
        metadata={
            "help": "instead of training, raise the learning rate from update to update, and show the loss over it"
        },
    )
    lr_range_start: float = field(default=1e-7, metadata={"help": "rate of the first update"})
    lr_range_end: float = field(
        default=1.0, metadata={"help": "rate of the last one, if the loss has not exploded by then"}
    )
    lr_range_updates: int = field(default=100, metadata={"help": "length of the test", "unit": "updates"})

    def validate(self) -> Iterator[str]:
        if not self.lr_range_start > 0.0:
            yield f"lr_range_start is {self.lr_range_start}; it must be above 0"
        if not self.lr_range_start < self.lr_range_end < float("inf"):
            yield f"lr_range_end is {self.lr_range_end}; it must be above lr_range_start, {self.lr_range_start}"
        if self.lr_range_updates < 10:
            yield f"lr_range_updates is {self.lr_range_updates}; it must be 10 or more"
