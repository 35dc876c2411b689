"""Child processes that end with their parent: at Ctrl-C, at SIGTERM, and when it dies."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from ftk.errors import UserError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1
_WATCH_SECONDS = 1.0


def start_child(target: Callable[..., Any], *arguments: Any, fresh: bool = False) -> tuple[Connection, BaseProcess]:
    """Starts `target(connection, *arguments)` in a process of its own.

    Ctrl-C, which reaches every process of a terminal, is left to the parent; SIGTERM ends the child at once, and so
    does the end of the thread that calls this function, however it ends.

    Args:
        target, arguments: importable and picklable.
        fresh: start a new Python instead of a copy of this process.

    Returns:
        the parent's end of the pipe to the child, and the process.
    """
    # A fork starts in milliseconds and has all plugins; elsewhere a child imports what it needs.
    context: Any = multiprocessing.get_context("fork" if can_fork() and not fresh else "spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(target, theirs, os.getpid(), arguments), daemon=True)
    mask = _block_signals()  # until the child has put its own handlers in place of its parent's
    try:
        process.start()
    finally:
        _restore_signals(mask)
    theirs.close()
    return ours, process


def can_fork() -> bool:
    """Whether children are copies of this process, which share what it has in memory."""
    return sys.platform == "linux"


def call_in_child(function: Callable[..., T], *arguments: Any) -> T:
    """`function(*arguments)` in a new Python, so that Ctrl-C ends even a library that ignores it.

    Not in a fork: a library that starts threads (SentencePiece's trainer) can crash in the copy of a process that
    has threads of its own (PyTorch's).

    Raises:
        UserError, OSError: raised by the function.
        RuntimeError: the function raised something else, or the process was killed.
    """
    connection, process = start_child(send_result, function, *arguments, fresh=True)
    try:
        return receive(connection, process)
    finally:
        stop_child(connection, process)


def end_with_parent(parent: int, by: int = getattr(signal, "SIGKILL", 0)) -> None:
    """Has this process end as soon as its parent has ended, however that ends and whatever this one waits for.

    On Linux the kernel does it when the thread that started this process ends; elsewhere a thread watches.

    Args:
        parent: the process that started this one; if it is gone already, this one ends here.
        by: the signal that it gets, on Linux.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    elif hasattr(os, "getppid"):
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_WATCH_SECONDS)
    os._exit(1)


def receive(connection: Connection, process: BaseProcess) -> Any:
    """What a child sends: a value, or the error that `send_result` makes of an exception.

    Raises:
        UserError, OSError: the child sent it.
        RuntimeError: the child failed or is dead.
    """
    try:
        answer = connection.recv()
    except (EOFError, OSError) as error:
        raise death(process) from error
    if isinstance(answer, (UserError, OSError)):
        raise answer
    if isinstance(answer, _Failure):
        raise RuntimeError(f"a worker process failed: {answer.summary}") from RuntimeError(answer.trace)
    return answer


def send_result(connection: Connection, function: Callable[..., Any], *arguments: Any) -> bool:
    """Sends what a function returns, or what it raises, to the parent; False if the parent is gone."""
    try:
        result = function(*arguments)
    except (UserError, OSError) as error:
        result = error
    except Exception as error:
        result = _Failure(f"{type(error).__name__}: {error}", traceback.format_exc())
    try:
        connection.send(result)
    except OSError:
        return False
    return True


def death(process: BaseProcess) -> RuntimeError:
    """The error that says how a child ended."""
    process.join(timeout=5)
    hint = "; killed, perhaps because memory ran out: try fewer `workers`" if process.exitcode == -9 else ""
    return RuntimeError(f"a worker process ended with exit code {process.exitcode}{hint}")


def stop_child(connection: Connection, process: BaseProcess) -> None:
    """Ends a child, if it has not ended, and waits for that."""
    process.terminate()
    process.join()
    connection.close()


class _Failure(NamedTuple):
    summary: str
    trace: str


def _run(target: Callable[..., Any], connection: Connection, parent: int, arguments: tuple[Any, ...]) -> None:
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_signals(set())
    target(connection, *arguments)


def _block_signals() -> set[Any] | None:
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


def _restore_signals(mask: set[Any] | None) -> None:
    if mask is not None and hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
