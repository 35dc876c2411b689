"""The folder of a run: created, locked, and cleared of old checkpoints."""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftk.checkpoint import BEST, LAST, checkpoint_name, is_checkpoint
from ftk.data.indexed.output_folder import RECORD
from ftk.errors import UserError
from ftk.files import open_lock, reason, write_whole
from ftk.parsing import dump_yaml
from ftk.trainer.config import CheckpointConfig

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

LOCK = ".lock"
LOCK_WAIT_SECONDS = 12.0  # data workers of a killed run hold its lock for some seconds


class RunFolder:
    """`save_dir`; used by the main rank only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None  # held while this run trains

    def prepare(self, config: Mapping[str, Any]) -> None:
        """Create the folder with its `config.yaml`.

        Raises:
            UserError: it cannot be created or written to, it is a data folder, or another process trains in it.
            OSError: the disk is full or the like.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"`save_dir` {self.path}: a file is in the way; name a folder") from error
        except FileNotFoundError as error:  # /proc/run, say
            raise UserError(f"`save_dir` {self.path}: no folder can be made there") from error
        except OSError as error:
            raise _not_writable(self.path, error) from error
        self.claim()
        for link in (self.path / LAST, self.path / BEST):  # now, and not at the first save
            if link.exists() and not link.is_symlink():
                raise UserError(f"{link}: is not a link; move it away, ftk needs a link of this name")
        try:
            write_whole(self.path / "config.yaml", dump_yaml(dict(config)))
        except OSError as error:
            raise _not_writable(self.path / "config.yaml", error) from error

    def claim(self) -> None:
        """Lock the folder, so that no other process trains in it; the system unlocks it when this process ends.

        Raises:
            UserError: it is a data folder, another process trains in it, or it cannot be written to.
        """
        if (self.path / RECORD).exists():
            raise UserError(f"`save_dir` {self.path}: it holds data (see {RECORD}); name another folder")
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
                    f"`save_dir` {self.path}: another ftk-train is running in it; name another folder"
                ) from error
            except OSError as error:  # a file system without locks
                logger.warning("%s: cannot be locked (%s); do not train in it twice", self.path, error.strerror)
            break
        self._lock = lock

    def release(self) -> None:
        """Unlock the folder."""
        if self._lock is not None:
            if fcntl is not None:
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # closing is not enough: data workers share the file
            os.close(self._lock)
            self._lock = None


def _not_writable(path: Path, error: OSError) -> Exception:
    """The exception to raise: a `UserError` for a mistake of the user, else an `OSError` with the file's name."""
    if isinstance(error, PermissionError):
        return UserError(f"`save_dir` {path}: no permission to write there")
    if error.errno in (errno.EROFS, errno.ELOOP, errno.EISDIR, errno.EINVAL):
        return UserError(f"`save_dir`: {path} cannot be written ({reason(error)})")
    return OSError(error.errno, reason(error), str(path))


@dataclass(frozen=True)
class SavedStatus:
    """The checkpoints and validations of a run after a save.

    Attributes:
        num_updates: of the checkpoint that was saved.
        best: number of updates of the best validation, None before the first.
        scores: checkpoint's name -> its validation metric.
    """

    num_updates: int
    best: int | None
    scores: Mapping[str, float]


def best_of(folder: Path, status: SavedStatus, config: CheckpointConfig) -> Path | None:
    """The new target of the link `checkpoint_best` in a run's folder; None: the link does not change.

    That is the checkpoint of the best validation. If it could not be saved, the link keeps its target; if that does not
    exist, the target is the best existing checkpoint.
    """
    if status.best is not None and is_checkpoint(folder / checkpoint_name(status.best)):
        return folder / checkpoint_name(status.best)
    if is_checkpoint(folder / BEST):
        return None
    return next((folder / name for name in _ranked(status, config) if is_checkpoint(folder / name)), None)


def stale(folder: Path, present: Iterable[Path], status: SavedStatus, config: CheckpointConfig) -> list[Path]:
    """The checkpoints to remove.

    The last and the best one are always kept, both the targets of the links and those that `status` names.

    Args:
        present: its `checkpoint_N`.
        config: how many are kept.
    """
    if config.keep_last == 0:
        return []
    numbers = {path: int(path.name.rpartition("_")[2]) for path in present}
    # Those beyond the current update are from before the run was continued from an older checkpoint. They are kept,
    # because the user may want them, and do not count as the newest.
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
    return sorted(status.scores, key=status.scores.__getitem__, reverse=config.maximizes)
