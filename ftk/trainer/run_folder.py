"""The folder of a run: made once the run is sure to start, locked by it alone; and which checkpoints stay in it."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ftk.checkpoint import BEST, LAST, checkpoint_name, is_checkpoint
from ftk.data.indexed.output_folder import RECORD
from ftk.errors import UserError
from ftk.files import open_lock, reason, write_whole
from ftk.trainer.config import CheckpointConfig

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
LOCK_WAIT_SECONDS = 12.0  # data workers of a run that was killed hold its lock until they notice, some seconds later


class RunFolder:
    """`--save-dir`; the main rank alone uses it."""

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


@dataclass(frozen=True)
class SavedStatus:
    """What a run knows of its checkpoints when it has written one.

    Attributes:
        num_updates: of the one that was written.
        best: number of updates of the best validation, None before the first.
        scores: checkpoint's name -> its validation metric.
    """

    num_updates: int
    best: int | None
    scores: Mapping[str, float]


def best_of(folder: Path, status: SavedStatus, config: CheckpointConfig) -> Path | None:
    """The checkpoint of a run's folder that `checkpoint_best` is to mean; None: it stays as it is.

    That is the one of the best validation. Where it could not be saved, an older best one stays; where that is gone,
    the best of those that are there takes its place.
    """
    if status.best is not None and is_checkpoint(folder / checkpoint_name(status.best)):
        return folder / checkpoint_name(status.best)
    if is_checkpoint(folder / BEST):
        return None
    return next((folder / name for name in _ranked(status, config) if is_checkpoint(folder / name)), None)


def stale(folder: Path, present: Iterable[Path], status: SavedStatus, config: CheckpointConfig) -> list[Path]:
    """The checkpoints that need not stay.

    The last and the best one always do: those that the links mean, whatever state the links are in, and those that
    `status` names.

    Args:
        folder: of the run.
        present: its `checkpoint_N`.
        status: what the run knows of them.
        config: how many are kept.
    """
    if config.keep_last == 0:
        return []
    numbers = {path: int(path.name.rpartition("_")[2]) for path in present}
    # Those beyond the present update were there before the run went on from an older one. They are not the newest,
    # and whoever had it go on may want them: they stay until the run has come there itself.
    newest = sorted((path for path in numbers if numbers[path] <= status.num_updates), key=numbers.__getitem__)
    kept = {path.name for path in newest[-config.keep_last :]} | {checkpoint_name(status.num_updates)}
    kept |= {path.name for path in numbers if numbers[path] > status.num_updates}
    kept |= {link.readlink().name for link in (folder / LAST, folder / BEST) if link.is_symlink()}
    if status.best is not None:
        kept.add(checkpoint_name(status.best))
    there = {path.name for path in numbers}
    kept |= set([name for name in _ranked(status, config) if name in there][: config.keep_best])
    every = config.keep_interval_updates
    return [path for path, number in numbers.items() if path.name not in kept and not (every and number % every == 0)]


def _ranked(status: SavedStatus, config: CheckpointConfig) -> list[str]:
    """Names of the checkpoints with a validation, the best first."""
    return sorted(status.scores, key=status.scores.__getitem__, reverse=config.maximize_best_metric)
