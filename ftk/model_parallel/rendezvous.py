"""How the processes of a run find each other, and who is missing where one of them waits in vain."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator

import torch.distributed as dist

ANSWER_SECONDS = 5.0  # in which all that wait in vain say so: they began to wait at about the same time

# What the back ends say when their time is over: no exception class of theirs tells it.
_IN_VAIN = ("timed out waiting", "wait timeout", "collective operation timeout")


class ProcessHangs(RuntimeError):
    """This process has waited for others, and they did not come; the message names them."""


def meet(store: dist.Store, rank: int, size: int, timeout_seconds: float) -> str:
    """Wait until all processes are here.

    torchrun's store outlives its restarts: what processes have left there that are gone looks like what living ones
    say. So each process asks with a word that nobody has used before, and the first one answers all that it finds,
    until each has said that it got the answer. (Torchrun's number of the attempt would not do: where machines are
    several, each counts its own restarts.)

    Returns:
        A name that these processes have in common, and no others before or after them.

    Raises:
        ProcessHangs: they did not come in time.
    """
    own = uuid.uuid4().hex
    others = range(1, size)
    if rank != 0:
        store.set(f"ftk_asks_{rank}", own)
        if not _comes(lambda: store.check([f"ftk_answer_{own}"]), timeout_seconds):
            raise ProcessHangs(_missing([0], timeout_seconds))
        name = store.get(f"ftk_answer_{own}").decode()
        store.set(f"{name}_met_{rank}", "")
        return name
    asked = [f"ftk_asks_{other}" for other in others]
    answered: set[bytes] = set()

    def all_have_met() -> bool:
        if store.check(asked):
            new = set(store.multi_get(asked)) - answered
            for word in new:
                store.set(f"ftk_answer_{word.decode()}", own)
            answered.update(new)
        return store.check([f"{own}_met_{other}" for other in others])

    if not _comes(all_have_met, timeout_seconds):
        absent = [other for other in others if not store.check([f"{own}_met_{other}"])]
        raise ProcessHangs(_missing(absent, timeout_seconds))
    return own


@contextlib.contextmanager
def hangs_named(store: dist.Store, rank: int, size: int, timeout_seconds: float, hint: str) -> Iterator[None]:
    """What fails inside because this process has waited in vain names those that it waited for.

    All that fail say so where they have met; who says nothing, hangs.

    Args:
        store: of these processes alone.
        timeout_seconds: what a process waits for others.
        hint: the end of the message.

    Raises:
        ProcessHangs: for a time limit that was exceeded; what else is raised stays as it is.
    """
    try:
        yield
    except Exception as error:
        in_vain = waited_in_vain(error)
        silent = _say(store, rank, size, ANSWER_SECONDS if in_vain else 0.0)
        if not in_vain:
            raise
        raise ProcessHangs(_missing(silent, timeout_seconds) + hint) from error


def waited_in_vain(error: BaseException | None) -> bool:
    """Whether an error is, or comes of, a time limit that was exceeded in waiting for other processes."""
    while error is not None:
        if isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _IN_VAIN):
            return True
        error = error.__cause__
    return False


def _say(store: dist.Store, rank: int, size: int, seconds: float) -> list[int] | None:
    """Say that this process has failed, and hear for so long which others have.

    Returns:
        Those that have not; None: where they meet nobody answers.
    """
    heard: list[list[int]] = []

    def say_and_hear() -> None:
        def silent() -> list[int]:
            return sorted(set(range(size)) - set(map(int, store.get("failed").split())))

        with contextlib.suppress(RuntimeError):  # the machine that keeps the store is lost
            store.append("failed", f"{rank} ")  # type: ignore[attr-defined]  # absent from its stubs
            if seconds > 0:
                _comes(lambda: not silent(), seconds)
                heard.append(silent())

    # In a thread of its own: to a machine that is lost it may wait for many minutes.
    thread = threading.Thread(target=say_and_hear, daemon=True)
    thread.start()
    thread.join(seconds + 2.0)
    return heard[0] if heard else None


def _missing(silent: Iterable[int] | None, timeout_seconds: float) -> str:
    minutes = timeout_seconds / 60
    waited = f"waited {minutes:g} minutes in vain" if minutes >= 2 else f"waited {timeout_seconds:g} seconds in vain"
    if silent is None:
        return f"{waited}, and the machine where the processes meet (MASTER_ADDR) does not answer"
    names = ", ".join(map(str, silent))
    if not names:
        return (
            f"{waited}, and so did all others: they wait for each other at different places, as where a hook has only "
            "some of them do what all have to"
        )
    which = f"processes {names}, which hang or have" if "," in names else f"process {names}, which hangs or has"
    return f"{waited}; nothing was heard of {which} lost the connection"


def _comes(happens: Callable[[], bool], seconds: float) -> bool:
    """Whether it happens in so many seconds. Signals are heard meanwhile, which a store's own waiting does not."""
    deadline, pause = time.monotonic() + seconds, 0.002
    while not happens():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.5)
    return True
