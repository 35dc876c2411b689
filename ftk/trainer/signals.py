"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 during training: the first asks for a clean stop, the second stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

PREEMPTIONS = ("SIGTERM", "SIGHUP", "SIGUSR1")
"""Sent by a scheduler before it takes the machine, or by a terminal when it is closed; a run that saves and stops then
exits with code 0."""

STOP_SIGNALS = ("SIGINT", *PREEMPTIONS)
"""The names of all signals that stop a run."""

REPEAT_SECONDS = 5.0
"""A rank may receive one signal twice: from the sender and from torchrun, which passes it on."""

_SIGNALS = tuple(getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name))  # Windows lacks two


class StopSignals:
    """A context manager that records the first such signal, which then does not end the process.

    Args:
        many_ranks: whether there are other ranks; then a second signal soon after the first is taken for the same one.
        reports: whether to report the signal on standard error.

    Attributes:
        received: name of the first signal ("SIGTERM"), None if there was none.
    """

    def __init__(self, *, many_ranks: bool = False, reports: bool = True) -> None:
        self.received: str | None = None
        self._repeat_seconds = REPEAT_SECONDS if many_ranks else 0.0
        self._reports = reports
        self._first = 0.0  # when the first came
        self._previous: dict[int, object] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            wanted = [signum for signum in _SIGNALS if not _is_ignored_hang_up(signum)]
            self._previous = {signum: signal.signal(signum, self._handle) for signum in wanted}
        return self

    def __exit__(self, *error: object) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        if os.getpid() != self._pid:
            # Forked dataloader workers inherit this handler. Ctrl-C, and a service manager's SIGTERM, reach the whole
            # process group, but the trainer needs the worker to finish its update: it ignores them. A second SIGTERM,
            # which `Process.terminate` sends, ends it.
            if signum == signal.SIGTERM:
                signal.signal(signum, signal.SIG_DFL)
        elif self.received is None:
            self.received = name
            self._first = time.monotonic()
            if name == "SIGHUP":
                _leave_closed_terminal()
            if self._reports:  # not by logging: the signal may interrupt a log call
                with contextlib.suppress(OSError):
                    os.write(
                        2, f"\n{name}: finishing this update, then saving; a second signal stops at once\n".encode()
                    )
        elif time.monotonic() >= self._first + self._repeat_seconds:
            raise KeyboardInterrupt(f"second signal ({name})")


def _is_ignored_hang_up(signum: int) -> bool:
    """Whether SIGHUP was ignored when this process started, as under nohup."""
    return signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) == signal.SIG_IGN


def _leave_closed_terminal() -> None:
    """Redirect output to /dev/null if the terminal is gone, so that writes do not fail."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
