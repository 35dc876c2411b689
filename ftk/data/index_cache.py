"""Arrays that are expensive to compute, kept as files: built once by one process, mapped by all the others."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "~/.cache/ftk/index"
_FORMAT = 1  # of the files; part of every name
_POLL_SECONDS = 0.05
_EDGE_BYTES = 1 << 16


class IndexCache:
    """A folder of arrays, each named by a hash of all it depends on.

    A file appears under its name when it is whole. While one process builds an array, others wait for it: the lock is
    the kernel's (`flock`), so that a builder that is killed leaves nothing locked. Who cannot write or lock there, or
    waited too long, computes the array for itself: a cache saves time and is never in the way.

    Args:
        folder: made when the first array is built; None: nothing is kept.
        timeout_seconds: how long to wait for another process's array.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, timeout_seconds: float = 600.0) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.timeout_seconds = timeout_seconds

    def get(self, kind: str, depends_on: Mapping[str, Any], build: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        """The array, from its file or built now.

        Args:
            kind: what it is; the first part of the file's name.
            depends_on: everything that decides its values, as plain values.
            build: computes it.

        Returns:
            The array, read-only; a map of the file where there is one.
        """
        if self.folder is None:
            return build()
        path = self.folder / f"{kind}-{_digest(kind, depends_on)}.npy"
        found = _read(path)
        if found is not None:
            return found
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                locked = stack.enter_context(_locked(path.with_suffix(".lock"), self.timeout_seconds))
            except OSError as error:
                logger.warning(
                    "index cache %s cannot be used (%s); choose another by --index-cache", self.folder, error
                )
                return build()
            if locked:
                found = _read(path)  # another process may have built it while this one waited
                return _write(path, build()) if found is None else found
        logger.warning(
            "%s is being built by another process for more than %g seconds; this one builds its own",
            path,
            self.timeout_seconds,
        )
        return build()


def file_identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What tells a file from others and from its earlier versions, without reading all of it."""
    path = Path(path)
    status = path.stat()
    with open(path, "rb") as file:
        edges = file.read(_EDGE_BYTES)
        file.seek(max(0, status.st_size - _EDGE_BYTES))
        edges += file.read(_EDGE_BYTES)
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "edges": hashlib.sha256(edges).hexdigest()}


def _digest(kind: str, depends_on: Mapping[str, Any]) -> str:
    text = json.dumps([_FORMAT, kind, dict(depends_on)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path) -> npt.NDArray[Any] | None:
    """The array of a file, None where there is none or it is damaged."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:  # shorter than its header says, or no header
        logger.warning("%s is damaged (%s); it is built anew", path, error)
        return None


def _write(path: Path, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Publishes an array under its name; what a killed builder left behind goes. The caller holds the lock."""
    for left_behind in path.parent.glob(f"{path.name}.tmp-*"):
        left_behind.unlink(missing_ok=True)
    part = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with open(part, "wb") as file:
            np.save(file, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:  # a full disk, say: the array is here all the same
        part.unlink(missing_ok=True)
        logger.warning("%s cannot be written (%s); it will be built again by the next run", path, error)
        return array
    written = _read(path)
    return array if written is None else written


@contextlib.contextmanager
def _locked(path: Path, timeout_seconds: float) -> Iterator[bool]:
    """Holds a file's lock; yields False where it could not be had in time."""
    import fcntl

    deadline = time.monotonic() + timeout_seconds
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    yield False
                    return
                time.sleep(_POLL_SECONDS)
        try:
            yield True
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # at once, even if a child process has inherited the file
    finally:
        os.close(descriptor)
