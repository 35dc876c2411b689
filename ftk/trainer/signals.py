"""SIGINT, SIGTERM, SIGHUP and SIGUSR1 during training: the first asks for a clean stop, the second stops at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType, TracebackType

PREEMPTIONS = ("SIGTERM", "SIGHUP", "SIGUSR1")
"""What a scheduler sends before it takes the machine, or a terminal when it is closed: a run that then saved has ended
as it should."""

STOP_SIGNALS = ("SIGINT", *PREEMPTIONS)
"""The names of all signals that stop a run."""

REPEAT_SECONDS = 5.0
"""A process of several is sent a signal twice, by whoever stops the job and by torchrun, which passes it on."""

_SIGNALS = tuple(getattr(signal, name) for name in STOP_SIGNALS if hasattr(signal, name))  # two are not on Windows


class StopSignals:
    """While entered, remembers the first such signal instead of dying of it.

    Args:
        several: whether this is one of several processes: then a second signal soon after the first is the same one,
            and another process may be the one that speaks.
        speaks: whether to say that a signal has come.

    Attributes:
        received: name of the signal ("SIGTERM"), None so far.
    """

    def __init__(self, *, several: bool = False, speaks: bool = True) -> None:
        self.received: str | None = None
        self._repeat_seconds = REPEAT_SECONDS if several else 0.0
        self._speaks = speaks
        self._first = 0.0  # when the first came
        self._previous: dict[int, object] = {}
        self._pid = os.getpid()

    def __enter__(self) -> StopSignals:
        self._pid = os.getpid()
        if threading.current_thread() is threading.main_thread():  # elsewhere Python allows no handlers
            wanted = [signum for signum in _SIGNALS if not _is_ignored_hang_up(signum)]
            self._previous = {signum: signal.signal(signum, self._handle) for signum in wanted}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, previous in self._previous.items():
            signal.signal(signum, previous)  # type: ignore[arg-type]
        self._previous = {}

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        name = signal.Signals(signum).name
        if os.getpid() != self._pid:
            self._handle_in_worker(signum)
        elif self.received is None:
            self.received = name
            self._first = time.monotonic()
            if name == "SIGHUP":
                _leave_closed_terminal()
            if self._speaks:  # os.write and not logging: it may have come in the middle of a line of the log.
                with contextlib.suppress(OSError):
                    os.write(2, f"\n{name}: finishing this update, then saving; once more stops at once\n".encode())
        elif time.monotonic() >= self._first + self._repeat_seconds:
            raise KeyboardInterrupt(f"second signal ({name})")

    def _handle_in_worker(self, signum: int) -> None:
        # Forked dataloader workers inherit this handler. Ctrl-C, and a service manager's SIGTERM, reach the
        # whole process group: the worker lives on, for the trainer still needs it to finish its update. The
        # second SIGTERM ends it: `Process.terminate` must have its way in the end.
        if signum == signal.SIGTERM:
            signal.signal(signum, signal.SIG_DFL)


def _is_ignored_hang_up(signum: int) -> bool:
    """Whether whoever started this process (nohup) has it live on when its terminal is closed."""
    return signum == getattr(signal, "SIGHUP", None) and signal.getsignal(signum) == signal.SIG_IGN


def _leave_closed_terminal() -> None:
    """Send what is still to be said nowhere, if the terminal is gone: each write to it would be an error."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
