"""What the processes of a run agree on before each update: its targets, and whether to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ftk.model_parallel.world import World
from ftk.trainer.signals import STOP_SIGNALS, StopSignals


class UpdateCounts(NamedTuple):
    """What an update is made of, on all processes together."""

    num_tokens: int  # padding counted
    num_targets: float  # or the sum of their weights


class Agreement:
    """Signals and clocks are of one process; decisions are of all.

    A process alone decides by what it sees, at any time. Of several, one may be sent a signal, or all at different
    times: they tell each other where all of them are at the same place, before an update and between batches of a
    validation, and know of a stop from then on. Telling is one sum of a few numbers on the host.

    Args:
        world: the processes.
        signals: of this process.
        time_is_up: whether the run has had its hours, by this process's clock; that of the main one counts.
    """

    def __init__(self, world: World, signals: StopSignals, time_is_up: Callable[[], bool]) -> None:
        self.world = world
        self._signals = signals
        self._time_is_up = time_is_up
        self._signal: str | None = None  # agreed
        self._hours_over = False  # agreed

    @property
    def signal(self) -> str | None:
        """Name of the signal that ends the run, None so far."""
        return self._signals.received if self.world.mesh is None else self._signal

    @property
    def hours_over(self) -> bool:
        """Whether the run has had its hours."""
        return self._time_is_up() if self.world.mesh is None else self._hours_over

    def before_update(self, counts: UpdateCounts) -> UpdateCounts:
        """The counts of all processes' batches together, and news of signals and clocks; all have to call it.

        Args:
            counts: of this process's own batches.
        """
        if self.world.mesh is None:
            return counts
        tokens, targets = self._tell(counts if self.world.counts_loss else UpdateCounts(0, 0))
        return UpdateCounts(int(tokens), targets)

    def should_stop(self) -> bool:
        """Whether a signal has come to any process; all have to call it."""
        if self.world.mesh is not None:
            self._tell(UpdateCounts(0, 0))
        return self.signal is not None

    def _tell(self, counts: UpdateCounts) -> list[float]:
        received = [float(self._signals.received == name) for name in STOP_SIGNALS]
        hours = float(self.world.is_main and self._time_is_up())
        tokens, targets, *flags, over = self.world.sum_host([*counts, *received, hours])
        if self._signal is None:
            self._signal = next((name for name, flag in zip(STOP_SIGNALS, flags, strict=True) if flag), None)
        self._hours_over |= bool(over)
        return [tokens, targets]
