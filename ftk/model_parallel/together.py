"""What processes do together succeeds on all of them or fails on all of them, with the same message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ftk.errors import UserError
from ftk.model_parallel.world import World

T = TypeVar("T")


class RankFailure(Exception):
    """Another process failed at what all do together; the message names it and says why."""


def together(world: World, work: Callable[[], T]) -> T:
    """Do the same on every process. Where it fails on one, it fails on all, so that none waits for the others in vain.

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
    failures = world.gather_json(None if error is None else _described(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise _remade(rank, failure)
    return result  # type: ignore[return-value]


def on_main(world: World, work: Callable[[], Any]) -> Any:
    """Do something on the main process alone, and tell all how it ended.

    Args:
        work: returns what JSON holds, and waits for no other process.

    Returns:
        What `work` returned, on every process (as JSON gives it back: tuples as lists).

    Raises:
        as `together`.
    """
    if world.mesh is None:
        return work()
    result = together(world, work if world.is_main else lambda: None)
    return world.broadcast_json(result)


def _described(error: Exception) -> dict[str, Any]:
    if isinstance(error, UserError):
        return {"kind": "user", "text": str(error)}
    if isinstance(error, OSError):
        return {"kind": "system", "errno": error.errno, "text": error.strerror or str(error), "file": error.filename}
    return {"kind": "other", "text": f"{type(error).__name__}: {error}"}


def _remade(rank: int, failure: dict[str, Any]) -> Exception:
    if failure["kind"] == "user":
        return UserError(failure["text"])
    if failure["kind"] == "system":
        return OSError(failure["errno"], failure["text"], failure["file"])
    return RankFailure(f"process {rank} failed: {failure['text']}")
