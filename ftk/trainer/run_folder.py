"""The folder of a run: made once the run is sure to begin, claimed by it alone, and seen by all of its processes."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from ftk.checkpoint import BEST, LAST
from ftk.data.indexed.output_folder import RECORD
from ftk.errors import UserError
from ftk.files import open_lock, reason, write_whole

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
        self._lock: int | None = None  # held while this run trains

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Make the folder with its `config.yaml`.

        Raises:
            UserError: it cannot be a folder or written to, it is a data folder, or another process trains in it.
            OSError: the disk is full or the like.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"--save-dir {self.path}: a file is in the way; name a folder") from error
        except FileNotFoundError as error:  # /proc/run, say
            raise UserError(f"--save-dir {self.path}: no folder can be made there") from error
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self.claim()
        for link in (self.path / LAST, self.path / BEST):  # now, and not at the first save
            if link.exists() and not link.is_symlink():
                raise UserError(f"{link}: is not a link; move it away, ftk keeps a link of this name")
        content = yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
        try:
            write_whole(self.path / "config.yaml", content)
        except OSError as error:
            raise _not_writable(self.path / "config.yaml", error) from error

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
            lock = open_lock(self.path / LOCK)
        except OSError as error:
            raise _not_writable(self.path / LOCK, error) from error
        deadline = time.monotonic() + LOCK_WAIT_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                os.close(lock)
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
            os.close(self._lock)
            self._lock = None


def _not_writable(path: Path, error: OSError) -> Exception:
    """What is to be raised: the user's mistake, or the world's failure with the file's name."""
    if isinstance(error, PermissionError):
        return UserError(f"--save-dir {path}: no permission to write there")
    if error.errno in (errno.EROFS, errno.ELOOP, errno.EISDIR, errno.EINVAL):
        return UserError(f"--save-dir: {path} cannot be written ({reason(error)})")
    return OSError(error.errno, reason(error), str(path))
