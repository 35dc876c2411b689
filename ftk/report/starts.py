"""`environment.json` of a run: for each start of the process when, where, with what and how it ended."""

from __future__ import annotations

import datetime
import json
import logging
import os
import platform
import sys
from pathlib import Path
from typing import Any

from ftk.files import read_json, reason, write_whole
from ftk.report.environment import collect

logger = logging.getLogger(__name__)

FILE_NAME = "environment.json"


class Starts:
    """The starts of a run, in a file in its folder. A file that cannot be read or written costs a warning, no more."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def begin(self, num_updates: int) -> None:
        """Append a start of this process."""
        start = {
            "time": _now(),
            "num_updates": num_updates,
            "host": platform.node(),
            "pid": os.getpid(),
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            **collect(),
        }
        self._write([*read_starts(self.path), start])

    def end(self, num_updates: int, reason: str) -> None:
        """Record how this process ended; without this record it was killed or is still running."""
        starts = read_starts(self.path)
        if starts and starts[-1].get("pid") == os.getpid():
            starts[-1]["end"] = {"time": _now(), "num_updates": num_updates, "reason": reason}
            self._write(starts)

    def _write(self, starts: list[dict[str, Any]]) -> None:
        try:
            write_whole(self.path, json.dumps(starts, indent=1) + "\n")
        except OSError as error:
            logger.warning("%s: not written (%s)", self.path, reason(error))


def read_starts(path: Path) -> list[dict[str, Any]]:
    """The starts in a file; none where there is no file or it holds something else."""
    try:
        starts = read_json(path)
    except (OSError, ValueError):
        return []
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
