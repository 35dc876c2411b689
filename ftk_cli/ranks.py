"""The ranks that torchrun starts: checks of its variables, and which rank reports a failure.

When one rank fails, the ranks that wait for it fail too, one after the other, and torchrun ends the rest. The user has
to see the first failure. torchrun gives each rank a path for a file that describes its failure; the folder above is
common to all ranks of this machine, and the first one to create a mark there reports.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from pathlib import Path

from ftk.errors import Diverged, LogFormatter, UserError, shown, visible

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
TORCHRUN = "TORCHELASTIC_RUN_ID"  # only torchrun itself sets it, `--launch` and others do not
MARK = "ftk_failed"
WAIT_SECONDS = 3.0  # for the rank that really failed to report it, or for torchrun to notice its end

_MOST = 10**6
_VARIABLES = {
    "WORLD_SIZE": (1, _MOST),
    "RANK": (0, _MOST - 1),
    "LOCAL_WORLD_SIZE": (1, _MOST),
    "LOCAL_RANK": (0, _MOST - 1),
    "MASTER_PORT": (0, 65535),
}
"""What torchrun sets: least and greatest value."""

# Messages of the back ends about a lost process, which has no exception class of its own.
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


def is_distributed() -> bool:
    """Whether this run has more than one process."""
    return _number("WORLD_SIZE", 1) > 1 and "RANK" in os.environ


def rank() -> int:
    return _number("RANK", 0)


def check_variables() -> None:
    """Check the environment variables that torchrun, or another launcher, sets for this process.

    Raises:
        UserError: a variable is not a number, or is out of range.
    """
    environment = os.environ
    several = "RANK" in environment and "WORLD_SIZE" in environment  # else MASTER_PORT may be Kubernetes' own
    for name, (least, greatest) in _VARIABLES.items() if several else list(_VARIABLES.items())[:2]:
        value = environment.get(name)
        if value is not None and not least <= _number(name, least - 1) <= greatest:
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


def _number(name: str, default: int) -> int:
    try:
        return int(os.environ.get(name, default))
    except ValueError:  # `check_variables` reports it
        return default


def mute_log() -> None:
    """On every rank but 0, send log lines and warnings to files only; errors are still shown."""
    if rank() == 0:
        return
    logging.captureWarnings(True)
    for handler in logging.getLogger().handlers:
        handler.setLevel(logging.ERROR)
        handler.setFormatter(LogFormatter(f"process {rank()}"))


def message_to_print(error: BaseException, message: str) -> str | None:
    """The message that this process prints about its failure; None: another process reports.

    Also writes the failure to torchrun's error file, unless it is only the consequence of another one.

    Args:
        error: being handled.
        message: what a single process would print.
    """
    if isinstance(error, Exception) and not is_consequence(error):
        record_failure(message, error)
        if is_first_failure():
            return message if isinstance(error, (UserError, Diverged)) else f"process {rank()}: {message}"
        time.sleep(1.0)  # torchrun ends all ranks once one has ended: give the reporting rank the time to print
        return None
    if isinstance(error, Exception):
        with contextlib.suppress(BaseException):  # torchrun's signal: it has seen the failure
            _wait_for_cause()
        message = f"process {rank()} lost its connection to another process"
        if TORCHRUN in os.environ:
            message += "; torchrun names the first failure below"
    elif rank() != 0:  # a signal that was sent to all
        return None
    return None if _failure_is_reported() or not is_first_failure() else message


def is_first_failure() -> bool:
    """Whether this process is the first of its machine to fail; call it once, it is true for one of them."""
    folder = _shared_folder()
    if folder is None:
        return True
    try:
        os.close(os.open(folder / MARK, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    except OSError:  # a folder that cannot be written to: better reported twice than never
        return True
    return True


def is_consequence(error: BaseException) -> bool:
    """Whether an error is only the consequence of another process's end."""
    if type(error).__name__ == "RankFailure":  # ftk.model_parallel.collective, which imports torch
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(sign in text for sign in _LOST)


def record_failure(message: str, error: BaseException | None = None) -> None:
    """Write the failure to torchrun's error file, so that torchrun's final report shows it.

    Args:
        message: as the user reads it.
        error: being handled; None: the command fails without an exception.
    """
    path = os.environ.get(ERROR_FILE)
    if path is None:
        return
    message = visible(message)
    trace = "" if error is None or isinstance(error, UserError) else f"\n{traceback.format_exc()}"
    extra = {"py_callstack": message + visible(trace), "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError):  # torchrun then shows the exit code only
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")


def _failure_is_reported() -> bool:
    """Whether another process has reported a failure."""
    folder = _shared_folder()
    return folder is not None and (folder / MARK).exists()


def _wait_for_cause() -> None:
    """Give the process that failed the time to report it."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline and not _failure_is_reported():
        time.sleep(0.05)


def _shared_folder() -> Path | None:
    """The folder that the processes of this machine share; None without torchrun."""
    path = os.environ.get(ERROR_FILE)
    return None if path is None else Path(path).parent.parent
