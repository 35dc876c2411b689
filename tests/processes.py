"""Processes of tests, forked from one that has imported PyTorch and ftk: a start takes milliseconds, not seconds.

That one is multiprocessing's fork server. Each pytest process has its own, which ends when pytest does, however it
ends; the forks end with it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import resource
import signal
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ftk_cli.__main__ import COMMANDS

_PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preloaded"])


def forked(function: Callable[..., Any], *arguments: Any) -> BaseProcess:
    """A process, not yet started, that calls a function of the top of a module; it is killed when pytest ends."""
    return _context.Process(target=_call, args=(function, arguments, dict(os.environ), _scratch().name))


@cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """The temporary folder of the forks, which goes with this process: forks that are killed remove nothing, and in
    Python 3.11 none of them does at its end."""
    return tempfile.TemporaryDirectory(prefix="ftk-tests-", ignore_cleanup_errors=True)


def run_command(
    name: str,
    *arguments: object,
    cwd: Path | None = None,
    input: str = "",
    stdout: Path | None = None,
    timeout: float = 300.0,
    before: Callable[[], None] | None = None,
    code: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `run_command("ftk-train", "--help")`, or `run_command("-c", CODE)` as Python does, in a process of its own.

    Args:
        stdout: where standard output goes instead of into the result.
        before: a function of the top of a module, called in the new process first.
        code: the exit code that it must have.

    Returns:
        Exit code, standard output and standard error, as `subprocess.run` does.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds, and was killed.
        AssertionError: it has another exit code than `code`.
    """
    words = [name, *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / stream for stream in ("stdin", "stdout", "stderr")]
        streams[0].write_text(input, encoding="utf-8")
        places = [streams[0], stdout or streams[1], streams[2]]
        process = forked(_main, words, os.fspath(cwd or Path.cwd()), [*map(str, places)], before)
        process.start()
        process.join(timeout)
        if timed_out := process.exitcode is None:
            process.kill()
            process.join()
        output, errors = (stream.read_text(encoding="utf-8") if stream.exists() else "" for stream in streams[1:])
        if timed_out:
            raise subprocess.TimeoutExpired(words, timeout, output, errors)
        assert code in (None, process.exitcode), f"{words[0]} ended with code {process.exitcode}:\n{output}{errors}"
        return subprocess.CompletedProcess(words, process.exitcode, output, errors)


def start_command(name: str, *arguments: object, errors: Path, before: Callable[[], None] | None = None) -> BaseProcess:
    """A command of `run_command` that has been started; its standard error goes to the file `errors`."""
    places = [os.devnull, os.devnull, str(errors)]
    process = forked(_main, [name, *map(str, arguments)], os.getcwd(), places, before)
    process.start()
    return process


@contextmanager
def commands_of_shells() -> Iterator[dict[str, str]]:
    """Inside, `ftk-train` and the other commands of a shell script are forks, if it gets the environment yielded here.

    A command in the folder that stands first in PATH sends its words, working folder and environment to this process,
    which forks, and ends with the exit code that it gets back. The fork takes over its standard streams.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "socket"
        for name in COMMANDS:
            file = Path(folder) / f"ftk-{name}"
            file.write_text(_STUB.format(python=sys.executable, place=str(place)))
            file.chmod(0o755)
        with socketserver.ThreadingUnixStreamServer(str(place), _Fork) as server:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
            try:
                yield {
                    **os.environ,
                    "PATH": os.pathsep.join((folder, str(Path(sys.executable).parent), os.environ["PATH"])),
                }
            finally:
                server.shutdown()


_STUB = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect({place!r})
    signal.signal(signal.SIGTERM, lambda number, frame: connection.sendall(b"end\\n"))
    words = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
    line = json.dumps([words, os.getcwd(), os.getpid(), dict(os.environ)])
    connection.sendall(line.encode() + b"\\n")
    sys.exit(int(connection.makefile().readline() or 1))
"""


class _Fork(socketserver.StreamRequestHandler):
    """Runs the command that a shell's small program asks for, as a fork; answers with its exit code."""

    def handle(self) -> None:
        words, cwd, pid, environment = json.loads(self.rfile.readline())
        process = forked(_of_shell, words, cwd, [f"/proc/{pid}/fd/{number}" for number in range(3)], environment)
        process.start()
        threading.Thread(target=self._pass_on, args=(process,), daemon=True).start()
        process.join()
        self.wfile.write(f"{process.exitcode}\n".encode())

    def _pass_on(self, process: BaseProcess) -> None:
        """Ends the fork when a SIGTERM has reached the small program."""
        with suppress(OSError, ValueError):  # closed: the command has ended
            if self.rfile.readline():
                process.terminate()


def wait_until(
    happened: Callable[[], Any], process: subprocess.Popen[str] | BaseProcess, timeout: float = 300.0
) -> None:
    """Return as soon as `happened()` is true.

    Raises:
        AssertionError: the process that is to bring it about has ended before, or `timeout` seconds have passed.
    """
    deadline = time.monotonic() + timeout
    while not happened():
        code = process.exitcode if isinstance(process, BaseProcess) else process.poll()
        assert code is None or happened(), f"ended with code {code} before"
        assert time.monotonic() < deadline, f"nothing has happened for {timeout} seconds"
        time.sleep(0.01)


def end_with_parent() -> None:
    """This process is killed when the one that started it ends. (On Linux; nothing happens elsewhere.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def small_files_only() -> None:
    """The kernel refuses files above 100 kB, as on a full disk; as `before` of `run_command`."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def leave_out_fsync() -> None:
    """Nothing waits for the disk: what a killed process has written is there, and no test ends the machine."""
    os.fsync = os.fdatasync = lambda descriptor: None


def _call(function: Callable[..., Any], arguments: tuple[Any, ...], environment: dict[str, str], scratch: str) -> None:
    end_with_parent()
    leave_out_fsync()
    # Python's own, as in a process that a user starts. A fork server has set its own: one more server, which imports
    # all of ftk again, would start the data workers of each fork.
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    os.environ.clear()
    os.environ.update(environment, TMPDIR=scratch)
    tempfile.tempdir = scratch
    function(*arguments)


def redirect(path: str, number: int) -> None:
    """File 0, 1 or 2 of this process is `path` from now on."""
    descriptor = os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(descriptor, number)
    os.close(descriptor)


def _of_shell(words: list[str], cwd: str, streams: list[str], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    _main(words, cwd, streams, None)


def _main(words: list[str], cwd: str, streams: list[str], before: Callable[[], None] | None) -> None:
    os.chdir(cwd)
    if before is not None:
        before()
    for number, path in enumerate(streams):
        redirect(path, number)
    # multiprocessing has closed it
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = ["-c", *words[1:]]
    module = importlib.import_module(f"ftk_cli.{words[0].removeprefix('ftk-').replace('-', '_')}")
    sys.exit(module.main())
