"""How the processes of a run connect to each other, and which ranks are missing when one of them times out."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist

ANSWER_SECONDS = 5.0  # within which all ranks that timed out report it: they started to wait at about the same time

# Messages of the back ends for a timeout, which has no exception class of its own.
_TIMEOUTS = ("timed out waiting", "wait timeout", "collective operation timeout")


class ProcessHangs(RuntimeError):
    """This process waited for others, which did not arrive in time; the message names them."""


def wait_for_all(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Wait until all processes have connected.

    torchrun's store outlives its restarts, so keys of processes that have ended look like keys of running ones.
    Therefore each process asks under a fresh random name, and rank 0 answers every name that it finds until each rank
    has confirmed its answer. (torchrun's restart count is no such name: each machine counts its own restarts.)

    Returns:
        A name that these processes share, and that no process before or after them uses.

    Raises:
        ProcessHangs: not all of them connected in time.
    """
    own = uuid.uuid4().hex
    others = range(1, size)
    if rank != 0:
        store.set(f"ftk_asks_{rank}", own)
        if not _wait_until(lambda: store.check([f"ftk_answer_{own}"]), timeout_seconds):
            raise ProcessHangs(_missing([0], timeout_seconds))
        name = store.get(f"ftk_answer_{own}").decode()
        store.set(f"{name}_met_{rank}", "")
        return name
    asked = [f"ftk_asks_{other}" for other in others]
    answered: set[bytes] = set()

    def all_have_confirmed() -> bool:
        if store.check(asked):
            new = set(store.multi_get(asked)) - answered
            for word in new:
                store.set(f"ftk_answer_{word.decode()}", own)
            answered.update(new)
        return store.check([f"{own}_met_{other}" for other in others])

    if not _wait_until(all_have_confirmed, timeout_seconds):
        absent = [other for other in others if not store.check([f"{own}_met_{other}"])]
        raise ProcessHangs(_missing(absent, timeout_seconds))
    return own


@contextlib.contextmanager
def name_missing_ranks(store: dist.Store, rank: int, size: int, timeout_seconds: float, hint: str) -> Iterator[None]:
    """Inside, an error about a timeout names the ranks that this process waited for.

    Each rank that fails reports it in the store; a rank that reports nothing hangs.

    Args:
        store: of these processes alone.
        timeout_seconds: how long a process waits for others.
        hint: the end of the message.

    Raises:
        ProcessHangs: in place of a timeout; other errors pass unchanged.
    """
    try:
        yield
    except Exception as error:
        timed_out = is_timeout(error)
        silent = _report(store, rank, size, ANSWER_SECONDS if timed_out else 0.0)
        if not timed_out:
            raise
        raise ProcessHangs(_missing(silent, timeout_seconds) + hint) from error


def is_timeout(error: BaseException | None) -> bool:
    """Whether an error is, or was caused by, a timeout of waiting for other processes."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _TIMEOUTS):
            return True
        error = error.__cause__
    return False


def _report(store: dist.Store, rank: int, size: int, seconds: float) -> list[int] | None:
    """Report that this process has failed, and wait up to `seconds` for the others' reports.

    Returns:
        The ranks without a report; None: the store does not answer.
    """
    answers: list[list[int]] = []

    def report_and_wait() -> None:
        def silent() -> list[int]:
            return sorted(set(range(size)) - set(map(int, store.get("failed").split())))

        with contextlib.suppress(RuntimeError):  # the machine that keeps the store is lost
            store.append("failed", f"{rank} ")  # type: ignore[attr-defined]  # absent from its stubs
            if seconds > 0:
                _wait_until(lambda: not silent(), seconds)
                answers.append(silent())

    # In a thread of its own: a connection to a lost machine may block for many minutes.
    thread = threading.Thread(target=report_and_wait, daemon=True)
    thread.start()
    thread.join(seconds + 2.0)
    return answers[0] if answers else None


def _missing(silent: Iterable[int] | None, timeout_seconds: float) -> str:
    minutes = timeout_seconds / 60
    waited = f"timed out after {minutes:g} minutes" if minutes >= 2 else f"timed out after {timeout_seconds:g} seconds"
    if silent is None:
        return f"{waited}; the machine at MASTER_ADDR, where the processes connect, does not answer"
    names = ", ".join(map(str, silent))
    if not names:
        return (
            f"{waited}, as did all other processes: they wait for each other in different collectives; every rank "
            "must run the same ones, in hooks as well"
        )
    which = f"processes {names} hang or have" if "," in names else f"process {names} hangs or has"
    return f"{waited}; {which} lost the connection"


def _wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition holds within `seconds`. Signals are handled meanwhile, unlike in a store's own wait."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not condition():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.5)
    return True
