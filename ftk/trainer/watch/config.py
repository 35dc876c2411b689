"""Options for debugging and for the learning rate range test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option


@dataclass(kw_only=True)
class DebugConfig:
    """Profiles and statistics of a run; none of them changes a result."""

    profile: int = option(
        0,
        "profile this many updates: a trace for ui.perfetto.dev and a table of the most expensive operators, in the "
        "run's folder; 0: none",
        unit="updates",
        min=0,
    )
    profile_start: int = option(
        5, "updates of this process before the profiled ones", needs={"profile": True}, unit="updates", min=0
    )
    inspect_interval: int = option(
        0,
        "updates between two logs of statistics of parameters, their gradients and changes, and the outputs of "
        "modules; also written to inspect.jsonl; 0: never",
        unit="updates",
        min=0,
    )
    inspect: list[str] = option(
        [],
        "names of parameters and modules that `inspect_interval` shows, e.g. 'layers.0.*'; default: all",
        needs={"inspect_interval": True},
        several=True,
        metavar="PATTERN",
    )
    detect_anomaly: bool = option(
        False,
        "after a loss or gradient that is infinite or NaN, name the first module that produced it; the host waits for "
        "the device in every update",
    )


@dataclass(kw_only=True)
class LRRangeConfig:
    """A short run that shows good learning rates."""

    lr_range_test: bool = option(
        False, "instead of training, raise the learning rate with each update, and show the loss over it"
    )
    lr_range_start: float = option(1e-7, "rate of the first update", "(0, inf)", needs={"lr_range_test": True})
    lr_range_end: float = option(
        1.0, "rate of the last update, if the loss has not diverged before", needs={"lr_range_test": True}
    )
    lr_range_updates: int = option(100, "length of the test", needs={"lr_range_test": True}, unit="updates", min=10)

    def validate(self) -> Iterator[str]:
        if not self.lr_range_start < self.lr_range_end < float("inf"):
            yield f"lr_range_end is {self.lr_range_end}; it must be above lr_range_start, {self.lr_range_start}"
