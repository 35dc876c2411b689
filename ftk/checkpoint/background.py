"""A thread that runs one write job at a time while training continues."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from ftk.checkpoint.manifest import stop_writing_when

T = TypeVar("T")


class Background(Generic[T]):
    """Runs one job at a time in a thread, or, with `threaded` off, in the caller's thread.

    `collect` returns or raises what the job did. Python does not exit before a running job is done; `abandon` stops it
    early.
    """

    def __init__(self, *, threaded: bool = True) -> None:
        self.threaded = threaded
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def start(self, job: Callable[[], T]) -> None:
        """Start a job; the previous one must have been collected. With `threaded` off it is done on return."""
        assert self._thread is None, "collect() comes before start()"
        self._stop.clear()
        if not self.threaded:
            self._run(job)
            return
        self._thread = threading.Thread(target=self._run, args=(job,), name="ftk-checkpoint", daemon=False)
        self._thread.start()

    def collect(self, *, wait: bool) -> T | None:
        """The result of the last job, returned once; None without a job, or while it runs if `wait` is off.

        Raises:
            BaseException: the exception of the job, raised once.
        """
        if self._thread is not None:
            if self._thread.is_alive() and not wait:
                return None
            self._thread.join()
            self._thread = None
        error, result = self._error, self._result
        self._error, self._result = None, []
        if error is not None:
            raise error
        return result[0] if result else None

    def abandon(self) -> None:
        """Make a running job stop writing (`Abandoned`), which `collect` then raises."""
        self._stop.set()

    def _run(self, job: Callable[[], T]) -> None:
        if self.threaded:
            stop_writing_when(self._stop.is_set)
        try:
            self._result = [job()]
        except BaseException as error:
            if not self.threaded and not isinstance(error, Exception):
                raise  # Ctrl-C in the caller's thread
            self._error = error
