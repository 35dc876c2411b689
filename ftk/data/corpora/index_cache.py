"""Large arrays that are expensive to compute, kept as files: built by one process, mapped by all others."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data.indexed.file_map import FileMap
from ftk.files import open_lock, open_regular, reason, whole_file

logger = logging.getLogger(__name__)

DEFAULT_FOLDER = "~/.cache/ftk/index"
WORTH_CACHING = 1 << 22  # elements; fewer are computed in less time than a file takes to open
_FORMAT = 1  # of the files; part of every name
_POLL_SECONDS = 0.05
_EDGE_BYTES = 1 << 16
_CHECKSUM_BYTES = 4  # after the array, crc32: half a second per GiB

Check = Callable[[npt.NDArray[Any]], bool]


class IndexCache:
    """A folder of arrays, each named by a hash of all it depends on.

    A file gets its name when it is complete, and is used only if it passes the checks: other programs may write to the
    folder. While one process builds an array, others wait for it: the lock is the kernel's (`flock`), so that a builder
    that is killed leaves nothing locked. A process that cannot write or lock there, or waited too long, computes the
    array for itself: a cache saves time and never stops a run.

    Args:
        folder: made when the first array is built; None: nothing is kept, as for a user without a home folder.
        timeout_seconds: how long to wait for another process's array.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, timeout_seconds: float = 600.0) -> None:
        self.folder = None
        if folder is not None:
            with contextlib.suppress(RuntimeError):  # the user of a container may have no home folder
                self.folder = Path(folder).expanduser()
        self.timeout_seconds = timeout_seconds

    def get(
        self,
        kind: str,
        depends_on: Mapping[str, Any],
        build: Callable[[], npt.NDArray[Any]],
        *,
        dtype: npt.DTypeLike,
        count: int,
        is_sane: Check = lambda array: True,
    ) -> npt.NDArray[Any]:
        """The array, from its file or built now; one of fewer than `WORTH_CACHING` elements is always built.

        Args:
            kind: what it is; the first part of the file's name.
            depends_on: everything that its values depend on, as plain values.
            build: computes it.
            dtype, count: of the array, [count].
            is_sane: whether an array from a file can be what `build` computes.

        Returns:
            The array, read-only; a map of the file where there is one.
        """
        if self.folder is None or count < WORTH_CACHING:
            return build()
        path = self.folder / f"{kind}-{_digest(kind, depends_on)}.npy"
        expected = np.dtype(dtype), count, is_sane
        with contextlib.suppress(OSError, ValueError):  # missing or damaged; the process that rebuilds it warns
            return _read(path, *expected)
        with contextlib.ExitStack() as stack:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                locked = stack.enter_context(_locked(path.with_suffix(".lock"), self.timeout_seconds))
            except OSError as error:
                logger.warning(
                    "index cache %s cannot be used (%s); choose another by `index_cache`", self.folder, error
                )
                return build()
            if locked:
                try:
                    return _read(path, *expected)  # another process may have built it while this one waited
                except FileNotFoundError:
                    pass
                except (OSError, ValueError) as error:
                    logger.warning("%s is damaged (%s); it is rebuilt", path, reason(error))
                return _write(path, build(), *expected)
        logger.warning(
            "%s is being built by another process for more than %g seconds; this one builds its own",
            path,
            self.timeout_seconds,
        )
        return build()


def file_identity(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Distinguishes a file from others and from its earlier versions, without reading all of it."""
    path = Path(path)
    status = path.stat()
    with open_regular(path) as file:
        edges = file.read(_EDGE_BYTES)
        file.seek(max(0, status.st_size - _EDGE_BYTES))
        edges += file.read(_EDGE_BYTES)
    return {"bytes": status.st_size, "changed_ns": status.st_mtime_ns, "edges": hashlib.sha256(edges).hexdigest()}


def _digest(kind: str, depends_on: Mapping[str, Any]) -> str:
    text = json.dumps([_FORMAT, kind, dict(depends_on)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read(path: Path, dtype: np.dtype[Any], count: int, is_sane: Check) -> npt.NDArray[Any]:
    """The array of a file, mapped; OSError or ValueError where there is none or it is not what `_write` has written."""
    header, size = _header(dtype, count), dtype.itemsize * count
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != len(header) + size + _CHECKSUM_BYTES:
            raise ValueError("it has another size, or no checksum")
    mapped = FileMap(path)
    if mapped[: len(header)] != header:
        raise ValueError("it holds another array")
    array = np.frombuffer(mapped, dtype, count, len(header))
    if _checksum(array) != mapped[len(header) + size :]:
        raise ValueError("its checksum is not that of its content")
    if not is_sane(array):
        raise ValueError("its numbers cannot be right")
    mapped.check()
    return array


def _write(path: Path, array: npt.NDArray[Any], dtype: np.dtype[Any], count: int, is_sane: Check) -> npt.NDArray[Any]:
    """Writes an array under its name, and removes leftovers of killed builders. The caller holds the lock."""
    array = np.ascontiguousarray(array, dtype=dtype)
    try:
        if path.exists() and not path.is_file():
            path.unlink()  # a pipe, for example, which reading has refused
        with whole_file(path) as file:
            file.write(_header(dtype, count))
            file.write(array.data)
            file.write(_checksum(array))
        return _read(path, dtype, count, is_sane)
    except (OSError, ValueError) as error:  # a full disk, for example: the array is in memory all the same
        logger.warning("%s cannot be written (%s); it will be built again by the next run", path, reason(error))
        return array


def _header(dtype: np.dtype[Any], count: int) -> bytes:
    """NumPy's own, so that `np.load` reads the file."""
    header = io.BytesIO()
    kind = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(header, kind)
    return header.getvalue()


def _checksum(array: npt.NDArray[Any]) -> bytes:
    return zlib.crc32(array.data.cast("B") if array.size else b"").to_bytes(_CHECKSUM_BYTES, "little")


@contextlib.contextmanager
def _locked(path: Path, timeout_seconds: float) -> Iterator[bool]:
    """Holds a file's lock; yields False if another process still has it after the timeout."""
    import fcntl

    deadline = time.monotonic() + timeout_seconds
    descriptor = open_lock(path)
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
