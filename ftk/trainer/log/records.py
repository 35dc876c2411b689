"""`metrics.jsonl`: every training and validation record of a run, one JSON object per line."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
from io import FileIO
from pathlib import Path
from typing import Any

from ftk.errors import UserError
from ftk.files import open_to_write, read_lines, reason, write_whole
from ftk.report.runs import MAX_RECORD_BYTES

Record = dict[str, Any]

logger = logging.getLogger(__name__)


def to_json(record: Record) -> str:
    """One line of standard JSON; numbers that are not finite (if all updates were skipped) become null."""
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)


def plain_record(record: Record) -> Record:
    """A record for JSON: tensors and arrays that a hook added become numbers or lists.

    Other values that JSON cannot represent are left out, with a warning.
    """
    plain: Record = {}
    for key, value in record.items():
        if hasattr(value, "tolist"):
            value = value.tolist()
        try:
            json.dumps(value, allow_nan=isinstance(value, float))
        except (TypeError, ValueError):
            logger.warning("figure %r is left out: JSON cannot represent this %s", key, type(value).__name__)
        else:
            plain[key] = value
    return plain


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RecordFile:
    """Appends records to a file without delay. Reports a full disk once, and keeps records until there is space.

    Args:
        path: created with the first record; never a link, whose target may be any file.
        num_updates: updates done. Later records, of a process that died before its next checkpoint, are removed, since
            the same updates write them again.
        validation_pending: whether the validation after the last update is still to be done.

    Raises:
        UserError: the path is a link, or no regular file.
        OSError: the disk is full or the like.
    """

    def __init__(self, path: Path, num_updates: int, *, validation_pending: bool = False) -> None:
        self.path = path
        self._stream: FileIO | None = None
        self._waiting = b""  # not yet on disk: the rest of a line, and the lines after it
        if path.is_symlink():
            raise UserError(f"{path}: is a link; remove it, ftk writes a file of this name")
        if path.exists():
            _cut(path, num_updates, validation_pending)

    def write(self, record: Record) -> None:
        waited = bool(self._waiting)
        self._waiting += (to_json(record) + "\n").encode()
        try:
            self._write_waiting()
        except OSError as error:
            if not waited:
                logger.error("%s: cannot be written (%s); its records are kept for later", self.path, reason(error))

    def close(self) -> None:
        if self._waiting:
            with contextlib.suppress(OSError):
                self._write_waiting()
        if self._waiting:
            logger.error("%s: the last %d records are lost", self.path, self._waiting.count(b"\n"))
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _write_waiting(self) -> None:
        if self._stream is None:
            # Without a buffer, which would hide a failed write.
            self._stream = open_to_write(self.path, append=True)
        while self._waiting:  # a raw file may write a part only, if the disk is nearly full
            self._waiting = self._waiting[self._stream.write(self._waiting) :]


def read_records(path: Path) -> list[Record]:
    """The records of a file; invalid lines, such as one cut off by a kill, are left out."""
    records = []
    for line in read_lines(path, MAX_RECORD_BYTES):
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line or b"")
            records += [record] if isinstance(record, dict) else []
    return records


def _cut(path: Path, num_updates: int, validation_pending: bool) -> None:
    def is_ours(record: Record) -> bool:
        to_come = validation_pending and record.get("event") == "valid"
        number = record.get("num_updates", 0)
        return isinstance(number, int | float) and number < num_updates + (0 if to_come else 1)

    try:
        kept = [record for record in read_records(path) if is_ours(record)]
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EINVAL):
            raise
        raise UserError(f"{path}: {reason(error)}; remove it, ftk writes a file of this name") from error
    write_whole(path, "".join(to_json(record) + "\n" for record in kept))
