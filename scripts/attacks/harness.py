"""Runs commands on hostile input, each in a forked process, and judges what any command must hold to.

A case prepares files in a folder of its own and returns the command line:

    @case("checkpoint/manifest is a pipe", codes=(2,), says="is a pipe")
    def _(place: Place) -> list[str]:
        os.remove(place.run / "checkpoint_2" / "manifest.json")
        os.mkfifo(place.run / "checkpoint_2" / "manifest.json")
        return ["ftk-generate", "--path", str(place.run), "--input", str(place.prompts)]

`place.run` and `place.data` are copies, made when first asked for; `place.victim` is a file that nothing may change.
The function runs in the process that becomes the command: it may set limits and variables, replace what a module has,
and start other commands (`start`), which must have ended when this one has.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

VICTIM = "precious\n"
PROMPT = "The value of [MASK] is a list ."
_MAX_MEMORY_MB = 1500  # resident, torch's 300 MB included
_MAX_ADDRESS_BYTES = 8 << 30
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \| ")


class Place:
    """The folder of one case."""

    def __init__(self, folder: Path, workspace: Path) -> None:
        self.folder, self.workspace = folder, workspace
        self.victim = folder / "victim"
        self.victim.write_text(VICTIM)
        self.prompts = folder / "prompts.txt"
        self.prompts.write_text(PROMPT + "\n")

    @functools.cached_property
    def run(self) -> Path:
        """A run of two updates with checkpoint_1 and checkpoint_2."""
        return self._copy("run")

    @functools.cached_property
    def data(self) -> Path:
        """What ftk-preprocess made of the docs' text."""
        return self._copy("data-bin")

    @property
    def text(self) -> Path:
        """That text, not a copy."""
        return self.workspace / "train.txt"

    def _copy(self, name: str) -> Path:
        copy = self.folder / name
        if not copy.exists():  # the command's process may have made it, and the check asks for it, too
            shutil.copytree(self.workspace / name, copy, symlinks=True)
        return copy


@dataclass(frozen=True)
class Outcome:
    """What a command did.

    Attributes:
        code: exit code; -N if signal N ended it, None if it did not end in time.
        memory_mb: most resident memory.
        left_running: whether processes that it started outlived it.
    """

    code: int | None
    stdout: str
    stderr: str
    seconds: float
    memory_mb: float
    left_running: bool


Check = Callable[[Place, Outcome], "str | None"]


@dataclass(frozen=True)
class Case:
    """One attack; see `case`."""

    name: str
    make: Callable[[Place], list[str]]
    codes: tuple[int, ...]
    says: str
    check: Check
    seconds: float
    lines: int


CASES: list[Case] = []


def case(
    name: str,
    *,
    codes: Iterable[int] = (2,),
    says: str = "",
    check: Check = lambda place, outcome: None,
    seconds: float = 60,
    lines: int = 8,
) -> Callable[[Callable[[Place], list[str]]], None]:
    """Add an attack.

    Args:
        name: "room/what is done".
        codes: exit codes that are right.
        says: regular expression that the error output matches.
        check: returns a further fault.
        seconds: after which it counts as hanging.
        lines: most of a message; all errors of a configuration are reported at once.
    """

    def add(make: Callable[[Place], list[str]]) -> None:
        CASES.append(Case(name, make, tuple(codes), says, check, seconds, lines))

    return add


def start(words: list[str], output: Path, prepare: Callable[[], object] = lambda: None) -> int:
    """Run another command next to the case's own; returns its process id, for `os.waitpid`.

    Args:
        output: what it prints goes there, and its exit code to OUTPUT.code.
        prepare: is called in its process first.
    """
    _flush()
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            _redirect(output, 1)
            _redirect(output, 2)
            prepare()
            code = _main(words)
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            Path(f"{output}.code").write_text(str(code))
            os._exit(code)
    return pid


def wait_for(happened: Callable[[], object], seconds: float = 30) -> None:
    """Return as soon as `happened()` is true; raises TimeoutError if that takes too long."""
    deadline = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} seconds: {happened.__qualname__}")
        time.sleep(0.005)


def run_all(cases: Iterable[Case], workspace: Path, processes: int) -> Iterator[tuple[Case, Outcome, str | None]]:
    """Run cases, `processes` at a time; yields each with its fault as it ends."""
    tqdm.set_lock(threading.RLock())  # its own is shared by forked processes: one killed as it holds it stops them all
    waiting, running = list(reversed(list(cases))), dict[int, _Running]()
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                started = _Running(waiting.pop(), workspace)
                running[started.pid] = started
            ended = [pid for pid, process in running.items() if process.has_ended()]
            for pid in ended:
                process = running.pop(pid)
                outcome = process.outcome()
                yield process.case, outcome, _fault(process.case, process.place, outcome)
                process.clean()
            if not ended:
                time.sleep(0.005)
    finally:
        for process in running.values():
            process.kill()
            process.clean()


class _Running:
    def __init__(self, case: Case, workspace: Path) -> None:
        self.case = case
        self.folder = workspace / "cases" / re.sub(r"\W+", "-", f"{case.name}-{time.monotonic_ns()}")[-100:]
        (self.folder / "work").mkdir(parents=True)
        self.place = Place(self.folder / "work", workspace)
        self.began = time.monotonic()
        self._status: tuple[int | None, resource.struct_rusage] | None = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._be_the_command()

    def has_ended(self) -> bool:
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self._status = os.waitstatus_to_exitcode(status), usage
        elif time.monotonic() - self.began > self.case.seconds:
            os.killpg(self.pid, signal.SIGKILL)
            _, _, usage = os.wait4(self.pid, 0)
            self._status = None, usage
        return self._status is not None

    def outcome(self) -> Outcome:
        assert self._status is not None
        code, usage = self._status
        text = {name: (self.folder / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr")}
        left = self._group_lives() if code is not None else False
        return Outcome(
            code, **text, seconds=time.monotonic() - self.began, memory_mb=usage.ru_maxrss / 1024, left_running=left
        )

    def kill(self) -> None:
        if self._status is None:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)

    def clean(self) -> None:
        if self._group_lives():
            os.killpg(self.pid, signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _group_lives(self) -> bool:
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return False
            time.sleep(0.01)
        return True

    def _be_the_command(self) -> None:
        code = 70
        try:
            os.setsid()
            os.chdir(self.place.folder)
            _redirect(self.folder / "stdout", 1)
            _redirect(self.folder / "stderr", 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_AS, (_MAX_ADDRESS_BYTES, _MAX_ADDRESS_BYTES))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            code = _main(self.case.make(self.place))
        except BaseException:
            traceback.print_exc()
        finally:
            _flush()
            os._exit(code)


def _main(words: list[str]) -> int:
    """The exit code of a command that is run in this process."""
    command, *arguments = words
    sys.argv = words
    module = importlib.import_module("ftk_cli." + command.removeprefix("ftk-").replace("-", "_"))
    try:
        return module.main(arguments) or 0
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def _redirect(path: Path, descriptor: int) -> None:
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed terminal: the command has said so
            stream.flush()


def _fault(case: Case, place: Place, outcome: Outcome) -> str | None:
    """What any command must hold to, then what this case asks."""
    if outcome.code is None:
        return f"does not end within {case.seconds:g} seconds"
    if outcome.code not in case.codes:
        return f"exit code {outcome.code} instead of {' or '.join(map(str, case.codes))}"
    if "Traceback (most recent call last)" in outcome.stderr + outcome.stdout:
        return "a traceback"
    if outcome.memory_mb > _MAX_MEMORY_MB:
        return f"takes {outcome.memory_mb:.0f} MB of memory"
    if outcome.left_running:
        return "leaves processes running"
    if place.victim.read_text() != VICTIM:
        return "changes a file that is not its own"
    lines = [line for line in re.split(r"[\r\n]+", outcome.stderr) if line and not _LOG_LINE.match(line)]
    warned = re.search(r"(?m)^[-\d]+ [:\d]+ \| (WARNING|ERROR) \| ", outcome.stderr)
    if outcome.code and (not (lines or warned) or len(lines) > case.lines):
        return f"says {len(lines)} lines on the error output"
    if any(re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202e]", line) for line in lines):
        return "control characters on the error output"
    if case.says and not re.search(case.says, outcome.stderr):
        return f"does not say {case.says!r}"
    return case.check(place, outcome)
