"""`--launch N`: N processes of a command on this machine, without torchrun.

The parent imports no PyTorch: it starts the processes, passes signals on to them, and ends them all when one fails.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from ftk.child_process import end_with_parent
from ftk.config.common import MAX_PROCESSES
from ftk.errors import UserError
from ftk_cli import ranks
from ftk_cli.command import TRACEBACK

FLAG = "--launch"
GRACE_SECONDS = 30.0  # from SIGTERM to SIGKILL, as torchrun gives
SETTLE_SECONDS = 6.0  # after a signal each rank ends by itself, with 1 after Ctrl-C; a repeat within 5 s has no effect
_FORWARDED = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)]


def launch(command: str, argv: Sequence[str]) -> int | None:
    """Runs a command in the processes that `--launch` asks for, and waits for their end.

    Args:
        command: its name after "ftk-".
        argv: its arguments.

    Returns:
        The exit code: 0, or that of the first process that failed. None where one process is enough, or the arguments
        are wrong: then the caller goes on with them.

    Raises:
        UserError: this process was itself started by torchrun.
    """
    number, rest = _split(argv)
    if number is None or not 1 < number <= MAX_PROCESSES or not {"-h", "--help", "--version"}.isdisjoint(rest):
        return None
    if "RANK" in os.environ:
        raise UserError("`launch` starts the processes itself; give it without torchrun")
    shown = [TRACEBACK] if TRACEBACK in sys.argv else []  # `run` has taken it out of the arguments
    return run_processes(f"ftk-{command}", [sys.executable, "-c", _program(), command, *rest, *shown], number)


def run_processes(prog: str, command: list[str], number: int) -> int:
    """Starts a command `number` times, as the ranks of one world, and waits for their end; see `launch`.

    Args:
        command: program and arguments.
        number: of processes.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ftk-launch-") as folder, _catching_signals(processes) as received:
        port = free_port()
        for rank in range(number):
            processes.append(_start(command, rank, number, port, folder))
        return _wait(prog, processes, received)


def _split(argv: Sequence[str]) -> tuple[int | None, list[str]]:
    """The number that the last `--launch` has, None without a valid one, and the arguments without any `--launch`."""
    number, rest, words = None, [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            value = value if equals else next(words, "")
            number = int(value) if value.isdecimal() else None
        else:
            rest.append(word)
    return number, rest


def _program() -> str:
    """What Python runs in each process: `ftk`, which finds its modules where this process does.

    With `-m` or `-c` alone Python would look in the working folder first, and run a torch.py that lies there.
    """
    path = [entry for entry in sys.path if entry]
    return f"import sys; sys.path[:] = {path!r}; from ftk_cli.__main__ import main; sys.exit(main())"


def _start(command: list[str], rank: int, number: int, port: int, folder: str) -> subprocess.Popen[bytes]:
    error_file = Path(folder) / str(rank) / "error.json"
    error_file.parent.mkdir()
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(number),
        "LOCAL_WORLD_SIZE": str(number),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        ranks.ERROR_FILE: str(error_file),
    }
    return subprocess.Popen(
        command,
        env=os.environ | environment,
        stdin=None if rank == 0 else subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C reaches the parent alone, which passes it on once
        preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM) if sys.platform == "linux" else None,
    )


@contextmanager
def _catching_signals(processes: list[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """Inside, signals are put on the list that it gives, which `_wait` passes on; at the end no process is left."""
    received: list[int] = []

    def note(signum: int, frame: object) -> None:
        received.append(signum)

    previous = {s: signal.signal(s, note) for s in _FORWARDED if signal.getsignal(s) != signal.SIG_IGN}
    try:
        yield received
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
        for process in processes:
            process.wait()
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _wait(prog: str, processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> int:
    """Waits for all processes; passes signals on to them, and ends the others when one fails."""
    terminate_at, deadline, first, passed_on = None, None, 0, 0
    while True:
        for signum in received[passed_on:]:
            passed_on += 1
            for process in processes:
                process.send_signal(signum)
        codes = [process.poll() for process in processes]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed and first == 0:
            first = codes[failed[0]] or 0
            if first < 0 and -first not in received:
                name = signal.Signals(-first).name
                print(f"{prog}: process {failed[0]} was ended by {name}", file=sys.stderr, flush=True)
            terminate_at = time.monotonic() + (SETTLE_SECONDS if received else 0.0)
        if terminate_at is not None and time.monotonic() >= terminate_at:
            terminate_at, deadline = None, time.monotonic() + GRACE_SECONDS
            for process in processes:
                process.terminate()
        if None not in codes:
            return 1 if first < 0 else first
        if deadline is not None and time.monotonic() > deadline:
            return 1 if first < 0 else first  # `_catching_signals` ends the rest
        time.sleep(0.05)


def free_port() -> int:
    """A free TCP port below the range that Linux uses for outgoing connections, so that none of them takes it first."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)  # not seeded: other processes draw ports, too
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
