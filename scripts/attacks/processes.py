"""Processes and the machine: kills, limits, missing homes and folders.

Numbers of the attack's table (issue 12): 5, 6, 12, 17, 18, 19, and what it lists as not tried there.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from attacks.folders import generate, go_on
from attacks.harness import Outcome, Place, case, start, wait_for
from attacks.texts import preprocess, whole_or_absent

_NEW_MOUNTS, _PRIVATE, _DETACH = 0x20000, 1 << 18 | 1 << 14, 2


def add_cases(chance: random.Random) -> None:
    """The cases here are registered where they are defined."""


def train(place: Place, *arguments: str, data: str = "", run: str = "new") -> list[str]:
    config = str(place.workspace / "run" / "config.yaml")
    folder = str(place.folder / run)
    return ["ftk-train", data or str(place.workspace / "data-bin"), f"--config={config}", f"--save-dir={folder}",
            "--device=cpu", "--max-update=2", *arguments]  # fmt: skip


def meanwhile(place: Place, happened: Callable[[], object], act: Callable[[], object]) -> None:
    """A process that does something to the command as soon as something has happened."""
    if os.fork() == 0:
        with contextlib.suppress(TimeoutError):
            wait_for(happened)
            act()
        os._exit(0)


# -- 5, 6: signals ----------------------------------------------------------------------------------------------------


def _nothing_is_left(place: Place, outcome: Outcome) -> str | None:
    left = [path.name for path in place.folder.glob("out.tmp-*")]
    return f"{left} of the killed run" if left else whole_or_absent(place, outcome)


for _signal in (signal.SIGKILL, signal.SIGHUP, signal.SIGTERM):
    for _trains in (False, True):

        @case(
            f"processes/5 /6 {_signal.name} to ftk-preprocess{' as it trains a model' * _trains}, run again",
            codes=(0,),
            check=_nothing_is_left,
        )
        def _(place: Place, number: int = _signal, trains: bool = _trains) -> list[str]:
            text = place.folder / "text"
            text.write_bytes(place.text.read_bytes() * 100)
            words = preprocess(place, text, "--workers=3")
            if trains:
                words = [word for word in words if not word.startswith("--tokenizer-path")] + ["--vocab-size=5000"]
            pid = start(words, place.folder / "killed")
            wait_for(lambda: list(place.folder.glob("out.tmp-*" if trains else "out.tmp-*/train.bin.tmp-*")))
            os.kill(pid, number)
            os.waitpid(pid, 0)
            wait_for(lambda: not _others())
            return preprocess(place, place.prompts, "--workers=2")


def _others() -> list[int]:
    """Living processes of this one's group, such as workers of a killed command, which hold its folder.

    A killed process is a zombie before its other threads have ended, and these still hold what it had locked.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()  # state, parent, group, ...
            state, group, threads = fields[0], int(fields[2]), int(fields[17])
            lives = state != "Z" or threads > 1
            if lives and group == os.getpgrp() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


# -- 12, 19: homes ----------------------------------------------------------------------------------------------------


def _no_user() -> None:
    """As in a container whose user has no entry in passwd and no home."""
    import pwd

    os.environ.pop("HOME", None)

    def missing(name: object) -> None:
        raise KeyError(name)

    pwd.getpwuid = pwd.getpwnam = missing  # type: ignore[assignment]


@case("processes/12 no home: train", codes=(0,))
def _(place: Place) -> list[str]:
    _no_user()
    return train(place)


@case("processes/12 no home: generate", codes=(0,))
def _(place: Place) -> list[str]:
    _no_user()
    return generate(place)


@case("processes/12 no home: preprocess", codes=(0,))
def _(place: Place) -> list[str]:
    _no_user()
    return preprocess(place, place.prompts)


@case("processes/12 /19 no home: --save-dir=~/x", codes=(2,), says="home")
def _(place: Place) -> list[str]:
    _no_user()
    return train(place, "--save-dir=~/x")


def _in_the_home(place: Place, outcome: Outcome) -> str | None:
    return "makes a folder ~" if (place.folder / "~").exists() or not (place.folder / "home" / "x").exists() else None


@case("processes/19 --save-dir=~/x", codes=(0,), check=_in_the_home)
def _(place: Place) -> list[str]:
    os.environ["HOME"] = str(place.folder / "home")
    return train(place, "--save-dir=~/x")


# -- 17: data that does not fit or goes away --------------------------------------------------------------------------


@case("processes/17 token ids beyond the vocabulary", codes=(1, 2), says="token")
def _(place: Place) -> list[str]:
    size = (place.data / "train.bin").stat().st_size
    (place.data / "train.bin").write_bytes(b"\xf0\xff" * (size // 2))
    return train(place, data=str(place.data))


for _workers in (0, 1):

    @case(f"processes/17 train.bin is cut under a run, {_workers} workers", codes=(1, 2), says="train.bin|short")
    def _(place: Place, workers: int = _workers) -> list[str]:
        def cut() -> None:
            os.truncate(place.data / "train.bin", 0)

        data = str(place.data)
        meanwhile(place, (place.folder / "new" / "checkpoint_3").exists, cut)
        more = ("--max-update=100000", "--save-interval-updates=3", "--keep-interval-updates=1")
        return train(place, *more, f"--num-workers={workers}", data=data)


@case("processes/a data worker is killed", codes=(1,), says="worker")
def _(place: Place) -> list[str]:
    pid = os.getpid()

    def kill() -> None:
        for status in Path("/proc").glob("[0-9]*/status"):  # workers have a group of their own
            with contextlib.suppress(OSError):
                child = int(status.parent.name)
                if f"\nPPid:\t{pid}\n" in status.read_text() and child != os.getpid():
                    os.kill(child, signal.SIGKILL)

    meanwhile(place, (place.folder / "new" / "checkpoint_3").exists, kill)
    more = ("--max-update=100000", "--save-interval-updates=3", "--keep-interval-updates=1", "--num-workers=1")
    return train(place, *more)


# -- 18: limits of the machine ----------------------------------------------------------------------------------------


def _old_one_stays(place: Place, outcome: Outcome) -> str | None:
    from ftk.checkpoint import verify

    left = [path.name for path in place.run.glob("*.tmp-*")]
    return "; ".join(map(str, verify(place.run / "checkpoint_2"))) or (f"leaves {left}" if left else None)


COMMANDS: dict[str, Callable[[Place], list[str]]] = {
    "train": train,
    "train with a worker": lambda place: train(place, "--num-workers=1"),
    "generate": generate,
    "preprocess": lambda place: preprocess(place, place.text, "--workers=3"),
}

for _name, _command in COMMANDS.items():
    for _count in (0, 4, 12):

        @case(f"processes/18 {_count} more descriptors: {_name}", codes=(0, 1, 2))
        def _(place: Place, command: Callable[[Place], list[str]] = _command, count: int = _count) -> list[str]:
            words = command(place)
            limit = max(map(int, os.listdir("/proc/self/fd"))) + 1 + count
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            return words

    for _megabytes in (10, 100, 1000):

        @case(f"processes/{_megabytes} MB more of memory: {_name}", codes=(0, 1))
        def _(place: Place, command: Callable[[Place], list[str]] = _command, megabytes: int = _megabytes) -> list[str]:
            words = command(place)
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (megabytes << 20)
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return words


# -- folders that may not be written ----------------------------------------------------------------------------------


def _as_any_user() -> None:
    """Permissions count for root, too."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    ctypes.CDLL(None).capset(header, none)


def _read_only(place: Place) -> None:
    place.run.chmod(0o555)
    _as_any_user()


def _of_another(place: Place) -> None:
    place.run.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(place.run, 54321, 54321)
    else:
        place.run.chmod(0o555)
    _as_any_user()


def _unreadable(place: Place) -> None:
    place.run.chmod(0)
    _as_any_user()


def _restored(place: Place, outcome: Outcome) -> str | None:
    place.run.chmod(0o755)
    return _old_one_stays(place, outcome)


if sys.platform == "linux":
    for _name, _prepare, _codes in (
        ("is read-only", _read_only, (0,)),
        ("is of another user", _of_another, (0,)),
        ("cannot be read", _unreadable, (1, 2)),
    ):

        @case(f"processes/the run's folder {_name}: the run goes on", codes=(1, 2), check=_restored)
        def _(place: Place, prepare: Callable[[Place], None] = _prepare) -> list[str]:
            prepare(place)
            return go_on(place)

        @case(f"processes/the run's folder {_name}: generate", codes=_codes, check=_restored)
        def _(place: Place, prepare: Callable[[Place], None] = _prepare) -> list[str]:
            prepare(place)
            return generate(place)


def _without_shared_memory() -> bool:
    """Take /dev/shm away from this process and its children; False where that is not allowed."""
    libc = ctypes.CDLL(None)
    return (
        libc.unshare(_NEW_MOUNTS) == 0
        and libc.mount(None, b"/", None, _PRIVATE, None) == 0
        and libc.mount(b"/proc/sys/kernel", b"/dev/shm", None, 1 << 12, None) == 0  # no file can be made there
    )


for _name, _command in COMMANDS.items():

    @case(f"processes/no /dev/shm: {_name}", codes=(0, 1))
    def _(place: Place, command: Callable[[Place], list[str]] = _command) -> list[str]:
        if not _without_shared_memory():
            sys.stdout.write("/dev/shm cannot be taken away here: not tried\n")
        return command(place)
