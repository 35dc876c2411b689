"""A process among several that torchrun has started: which of them speaks when one fails.

A failure takes all of them along: those that wait for the one that failed fail too, one after the other, and torchrun
ends the rest. The first one is what a user has to see. torchrun gives each process a path for a file that tells of its
failure; the folder above is the same for all of this machine, and whoever is first to make a mark there may speak.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Mapping
from pathlib import Path

from ftk.errors import LogFormatter, UserError, shown, visible

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
MARK = "ftk_failed"
WAIT_SECONDS = 3.0  # for the process that has really failed to say so, or for torchrun to see that it is gone

_MOST = 10**6
_VARIABLES = {
    "WORLD_SIZE": (1, _MOST),
    "RANK": (0, _MOST - 1),
    "LOCAL_WORLD_SIZE": (1, _MOST),
    "LOCAL_RANK": (0, _MOST - 1),
    "MASTER_PORT": (0, 65535),
}
"""What torchrun sets: least and greatest value."""

# What the back ends say when another process is no longer there: no exception class of theirs tells it.
_LOST = (
    "connection closed by peer",
    "connection reset",
    "broken pipe",
    "connection refused",
    "connectfullmesh",
    "socket closed",
    "remote process",
    "communicator was aborted",
    "recv failed",
)


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this is one of several processes of a run."""
    return _number(environment, "WORLD_SIZE", 1) > 1 and "RANK" in environment


def rank(environment: Mapping[str, str] = os.environ) -> int:
    """This process's number."""
    return _number(environment, "RANK", 0)


def check_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Check what torchrun says of this process in the environment, or whoever sets the same variables.

    Raises:
        UserError: a variable is no number, or its number cannot be.
    """
    several = "RANK" in environment and "WORLD_SIZE" in environment  # else MASTER_PORT may be Kubernetes' own
    for name, (least, greatest) in _VARIABLES.items() if several else list(_VARIABLES.items())[:2]:
        value = environment.get(name)
        if value is not None and not least <= _number(environment, name, least - 1) <= greatest:
            raise UserError(
                f"the environment variable {name} is {shown(value)}; it must be a whole number from {least} to "
                f"{greatest:,}, as torchrun sets it; unset it to run one process"
            )
    for name, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if name in environment and size in environment and int(environment[name]) >= int(environment[size]):
            raise UserError(
                f"the environment variable {name} is {environment[name]}, but {size} is {environment[size]}; "
                f"use torchrun, or unset both to run one process"
            )


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    try:
        return int(environment.get(name, default))
    except ValueError:  # `check_variables` says so
        return default


def quieten() -> None:
    """Leave this process's log lines and warnings to files, if it is not the first one; its errors are shown."""
    if rank() == 0:
        return
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.ERROR)
        handler.setFormatter(LogFormatter(f"process {rank()}"))


def is_to_say(error: BaseException, message: str) -> str | None:
    """What this process says of its failure; None: another one speaks.

    Also leaves the failure where torchrun looks for the cause, unless it is but the consequence of another one.

    Args:
        error: being handled.
        message: what a process alone would say.
    """
    if isinstance(error, Exception) and not lost_another(error):
        record_failure(message, error)
        if may_speak():
            return message if isinstance(error, UserError) else f"process {rank()}: {message}"
        time.sleep(1.0)  # torchrun ends the others as soon as one has gone: let the one who speaks speak
        return None
    if isinstance(error, Exception):
        with contextlib.suppress(BaseException):  # torchrun's signal: it has seen the failure
            _wait_for_cause()
        message = f"process {rank()} has lost another process of this run; torchrun says below which failed first"
    elif rank() != 0:  # a signal that all have been sent
        return None
    return None if _has_been_said() or not may_speak() else message


def may_speak() -> bool:
    """Whether this process is the first of its machine to fail; asked once, and true for one of them."""
    folder = _shared_folder()
    if folder is None:
        return True
    try:
        os.close(os.open(folder / MARK, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # a folder that cannot be written to: better twice than never
        return True
    return True


def lost_another(error: BaseException) -> bool:
    """Whether an error is but the consequence of another process's end."""
    if type(error).__name__ == "RankFailure":  # ftk.model_parallel.collective, which imports torch
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)


def record_failure(message: str, error: BaseException | None = None) -> None:
    """Leave the failure where torchrun looks for it, so that its own report at the end names it.

    Args:
        message: as the user reads it.
        error: being handled; None: none was raised, and yet the command fails.
    """
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    message = visible(message)
    trace = "" if error is None or isinstance(error, UserError) else f"\n{traceback.format_exc()}"
    extra = {"py_callstack": message + visible(trace), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # torchrun then knows the exit code alone
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def _has_been_said() -> bool:
    """Whether another process has failed, and said why."""
    folder = _shared_folder()
    return folder is not None and (folder / MARK).exists()


def _wait_for_cause() -> None:
    """Give the process that has failed the time to say so."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline and not _has_been_said():
        time.sleep(0.05)


def _shared_folder() -> Path | None:
    """The folder that the processes of this machine have in common; None if torchrun has not started this one."""
    path = os.environ.get(ERROR_FILE)
    return None if path is None else Path(path).parent.parent
