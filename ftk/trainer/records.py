"""`metrics.jsonl`: every training and validation record of a run, one JSON object a line."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TextIO

Record = dict[str, Any]


def to_json(record: Record) -> str:
    """One line of standard JSON; what is no finite number (all updates were skipped, say) becomes null."""
    return json.dumps({key: _plain(value) for key, value in record.items()}, allow_nan=False)


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RecordFile:
    """Appends records to a file, each at once.

    Args:
        path: made when the first record comes.
        num_updates: where the run stands; records beyond it were written by a process that died before its
            next checkpoint, and the same updates will write them again: they are taken out.
        validation_pending: whether the validation after the last update is still to be done.
    """

    def __init__(self, path: Path, num_updates: int, *, validation_pending: bool = False) -> None:
        self.path = path
        self._stream: TextIO | None = None
        if path.exists():
            _cut(path, num_updates, validation_pending)

    def write(self, record: Record) -> None:
        if self._stream is None:
            self._stream = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._stream.write(to_json(record) + "\n")
        self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def read_records(path: Path) -> list[Record]:
    """The records of a file up to the first line that is none (a write cut short by a kill)."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if not isinstance(record, dict):
            break
        records.append(record)
    return records


def _cut(path: Path, num_updates: int, validation_pending: bool) -> None:
    def is_ours(record: Record) -> bool:
        to_come = validation_pending and record.get("event") == "valid"
        return record.get("num_updates", 0) < num_updates + (0 if to_come else 1)

    kept = [record for record in read_records(path) if is_ours(record)]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(to_json(record) + "\n" for record in kept), encoding="utf-8")
    os.replace(temporary, path)
