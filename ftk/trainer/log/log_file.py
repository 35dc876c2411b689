"""`log_file`: log lines and records as text in a file, including lines logged before the file was open."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable
from io import TextIOWrapper
from pathlib import Path

from ftk.errors import LogFormatter
from ftk.files import as_user_error, reason
from ftk.trainer.log.progress import one_line
from ftk.trainer.log.records import Record

logger = logging.getLogger(__name__)


class LogFile:
    """While entered, appends what is logged to a file.

    Args:
        path: of the file; its folder is created.
        total_updates: length of the run, shown in the lines.
        flag: the option that names the file, for messages.

    Raises:
        UserError: the file cannot be written.
    """

    def __init__(self, path: str, total_updates: int | None, flag: str = "`log_file`") -> None:
        self.total_updates = total_updates
        with as_user_error(f"{flag} {path}", "cannot be written"):
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._handler = _Appending(path, encoding="utf-8", errors="backslashreplace")
        self._handler.setFormatter(LogFormatter())

    def __enter__(self) -> LogFile:
        logging.getLogger().addHandler(self._handler)
        return self

    def __exit__(self, *error: object) -> None:
        logging.getLogger().removeHandler(self._handler)
        self._handler.close()

    def write(self, lines: Iterable[logging.LogRecord]) -> None:
        """Append earlier log lines."""
        for line in lines:
            self._handler.handle(line)

    def show(self, record: Record) -> None:
        """Append a training or validation record as a readable line."""
        line = one_line(record, self.total_updates)
        self._handler.handle(logging.LogRecord(__name__, logging.INFO, "", 0, line, None, None))


class _Appending(logging.FileHandler):
    """Reports a full disk once, keeps the lines until there is space, and never stops the run."""

    _failed = False

    def _open(self) -> TextIOWrapper:
        def opener(path: str, flags: int) -> int:  # which does not wait for the reader of a pipe
            return os.open(path, flags | os.O_NONBLOCK, 0o666)

        return open(self.baseFilename, "a", encoding=self.encoding, errors=self.errors, opener=opener)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._failed:
            self._failed = True  # before logging the error, which calls this method again
            logger.error("%s: cannot be written (%s); its lines are kept for later", self.baseFilename, reason(error))

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:
            logger.error("%s: the last lines are lost (%s)", self.baseFilename, reason(error))


class HeldLines(logging.Handler):
    """A context manager that keeps log lines for log files that are not open yet.

    A run that is refused must not change any file, so log files are opened only after its checkpoint is loaded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[logging.LogRecord] = []

    def __enter__(self) -> HeldLines:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.take()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record)

    def take(self) -> list[logging.LogRecord]:
        """Return the lines, and keep no more."""
        logging.getLogger().removeHandler(self)
        lines, self._lines = self._lines, []
        return lines
