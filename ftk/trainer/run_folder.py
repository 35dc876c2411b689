"""The folder of a run: made once the run is sure to begin, claimed by it alone, and seen by all of its processes."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import yaml

from ftk.checkpoint import BEST, LAST
from ftk.data.output_folder import RECORD
from ftk.errors import UserError

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
LOCK_WAIT_SECONDS = 12.0  # data workers of a run that was killed hold its lock until they notice, some seconds later


class RunFolder:
    """`--save-dir`. Of several processes the main one uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[str] | None = None  # held while this run trains

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Make the folder with its `config.yaml`.

        Raises:
            UserError: it cannot be a folder, it is a data folder, or another process trains in it.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"--save-dir {self.path}: a file is in the way; name a folder") from error
        except PermissionError as error:
            raise UserError(f"--save-dir {self.path}: no permission to write there") from error
        except FileNotFoundError as error:  # /proc/run, say
            raise UserError(f"--save-dir {self.path}: no folder can be made there") from error
        self.claim()
        for link in (self.path / LAST, self.path / BEST):  # now, and not at the first save
            if link.exists() and not link.is_symlink():
                raise UserError(f"{link}: is not a link; move it away, ftk keeps a link of this name")
        temporary = self.path / "config.yaml.tmp"
        temporary.write_text(yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        os.replace(temporary, self.path / "config.yaml")

    def claim(self) -> None:
        """Keep other processes from training in this folder; the system forgets the claim when this one ends.

        Raises:
            UserError: it is a data folder, another process trains in it, or it cannot be written to.
        """
        if (self.path / RECORD).exists():
            raise UserError(f"--save-dir {self.path}: it holds data, of which {RECORD} says all; name another folder")
        if self._lock is not None or fcntl is None:
            return
        try:
            lock = open(self.path / LOCK, "w")  # noqa: SIM115
        except PermissionError as error:
            raise UserError(f"--save-dir {self.path}: no permission to write there") from error
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                lock.close()
                raise UserError(
                    f"--save-dir {self.path}: another ftk-train is running in it; name another folder"
                ) from error
            except OSError as error:  # a file system without locks
                logger.warning("%s: cannot be locked (%s); do not train in it twice", self.path, error.strerror)
            break
        self._lock = lock

    def release(self) -> None:
        """Let others train in this folder."""
        if self._lock is not None:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: data workers have inherited the file
            self._lock.close()
            self._lock = None
