"""Options for debugging and for the learning rate range test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class DebugConfig:
    """Profiles and statistics of a run; none of them changes a result."""

    profile: int = field(
        default=0,
        metadata={
            "help": "profile this many updates: a trace for ui.perfetto.dev and a table of the most expensive "
            "operators, in the run's folder; 0: none",
            "unit": "updates",
        },
    )
    profile_start: int = field(
        default=5,
        metadata={
            "needs": {"profile": True},
            "help": "updates of this process before the profiled ones",
            "unit": "updates",
        },
    )
    inspect_interval: int = field(
        default=0,
        metadata={
            "help": "updates between two logs of statistics of parameters, their gradients and changes, and the "
            "outputs of modules; also written to inspect.jsonl; 0: never",
            "unit": "updates",
        },
    )
    inspect: list[str] = field(
        default_factory=list,
        metadata={
            "needs": {"inspect_interval": True},
            "help": "names of parameters and modules that `inspect_interval` shows, e.g. 'layers.0.*'; default: all",
            "several": True,
            "metavar": "PATTERN",
        },
    )
    detect_anomaly: bool = field(
        default=False,
        metadata={
            "help": "after a loss or gradient that is infinite or NaN, name the first module that produced it; "
            "the host waits for the device in every update"
        },
    )

    def validate(self) -> Iterator[str]:
        for name in ("profile", "profile_start", "inspect_interval"):
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; it must be 0 or more"


@dataclass(kw_only=True)
class LRRangeConfig:
    """A short run that shows good learning rates."""

    lr_range_test: bool = field(
        default=False,
        metadata={"help": "instead of training, raise the learning rate with each update, and show the loss over it"},
    )
    lr_range_start: float = field(
        default=1e-7, metadata={"needs": {"lr_range_test": True}, "help": "rate of the first update"}
    )
    lr_range_end: float = field(
        default=1.0,
        metadata={
            "needs": {"lr_range_test": True},
            "help": "rate of the last update, if the loss has not diverged before",
        },
    )
    lr_range_updates: int = field(
        default=100, metadata={"needs": {"lr_range_test": True}, "help": "length of the test", "unit": "updates"}
    )

    def validate(self) -> Iterator[str]:
        if not self.lr_range_start > 0.0:
            yield f"lr_range_start is {self.lr_range_start}; it must be above 0"
        if not self.lr_range_start < self.lr_range_end < float("inf"):
            yield f"lr_range_end is {self.lr_range_end}; it must be above lr_range_start, {self.lr_range_start}"
        if self.lr_range_updates < 10:
            yield f"lr_range_updates is {self.lr_range_updates}; it must be 10 or more"
