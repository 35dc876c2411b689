"""Work that all processes do: it succeeds on all of them or fails on all of them, with the same message."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from ftk.errors import UserError
from ftk.files import as_user_error, open_regular
from ftk.model_parallel.same_start import check_same_start
from ftk.model_parallel.world import World

T = TypeVar("T")


class RankFailure(Exception):
    """Another process failed in a collective operation; the message names it and its error."""


def collective(world: World, work: Callable[[], T]) -> T:
    """Do the same on every process. If it fails on one, it fails on all, so that none waits for a process that ended.

    `work` must not itself wait for other processes.

    Returns:
        What `work` returned here.

    Raises:
        Exception: what `work` raised here.
        UserError: what it raised on the first process where it failed, if that was one.
        OSError: likewise, with its errno.
        RankFailure: any other failure, if it failed elsewhere only.
    """
    if world.mesh is None:
        return work()
    result: T | None = None
    error: Exception | None = None
    try:
        result = work()
    except Exception as raised:
        error = raised
    failures = world.gather_json(None if error is None else _error_to_json(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _error_from_json(rank, failure)
    return result  # type: ignore[return-value]


def on_main(world: World, work: Callable[[], Any]) -> Any:
    """Do something on the main process only, and broadcast the result or the error.

    Args:
        work: returns what JSON holds, and waits for no other process.

    Returns:
        What `work` returned, on every process (as JSON gives it back: tuples as lists).

    Raises:
        as `collective`.
    """
    if world.mesh is None:
        return work()
    result = collective(world, work if world.is_main else lambda: None)
    return world.broadcast_json(result)


def check_same_files(world: World, files: Mapping[str, Iterable[Path]], max_bytes: int | None = None) -> None:
    """Refuse processes that see other contents in the same files. All have to call it.

    Args:
        files: by the option that names them.
        max_bytes: compare the size and the first `max_bytes` bytes of each file; None: the whole file.

    Raises:
        UserError: on all of them, with the option and the processes; also where one cannot read a file.
    """

    def facts() -> dict[str, list[str]]:
        return {
            f"the content of {name}": [_checksum(name, path, max_bytes) for path in paths]
            for name, paths in files.items()
        }

    if world.mesh is not None:
        check_same_start(collective(world, facts), world.gather_json)


def _checksum(name: str, path: Path, max_bytes: int | None) -> str:
    found = 0
    with as_user_error(f"{name} {path}"), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while (max_bytes is None or file.tell() < max_bytes) and (block := file.read(1 << 20)):
            found = zlib.crc32(block, found)
    return f"{size:,} bytes, checksum {found:08x}"


def _error_to_json(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"kind": "user", "text": str(error)}
    if isinstance(error, OSError):
        return {"kind": "system", "errno": error.errno, "text": error.strerror or str(error), "file": error.filename}
    return {"kind": "other", "text": f"{type(error).__name__}: {error}"}


def _error_from_json(rank: int, failure: dict[str, Any]) -> Exception:
    if failure["kind"] == "user":
        return UserError(failure["text"])
    if failure["kind"] == "system":
        return OSError(failure["errno"], failure["text"], failure["file"])
    return RankFailure(f"process {rank} failed: {failure['text']}")
