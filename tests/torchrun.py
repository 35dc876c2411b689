"""torchrun as a user starts it, for tests: on this machine, by gloo, with a time limit, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from elastic_test import descendants


def command(size: int, *arguments: object, options: tuple[str, ...] = ()) -> list[str]:
    """The command that starts `arguments` in `size` processes; one process needs no torchrun."""
    words = [str(argument) for argument in arguments]
    if size == 1:
        return [sys.executable, *words]
    # A port of its own, so that runs beside each other do not meet.
    head = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size), *options]
    return [*head, *words]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def torchrun(
    size: int, *arguments: object, timeout: float = 240.0, options: tuple[str, ...] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """Run to the end; standard output and error as text."""
    with started(size, *arguments, options=options, **more) as process:
        stdout, stderr = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


@contextlib.contextmanager
def started(
    size: int, *arguments: object, options: tuple[str, ...] = (), **more: str
) -> Iterator[subprocess.Popen[str]]:
    """A run under way; all of its processes are gone afterwards."""
    process = subprocess.Popen(
        command(size, *arguments, options=options),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        for pid in [*descendants(process.pid), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def rank_pid(pid: int, rank: int) -> int:
    """The process with a rank among those that torchrun has started."""
    wanted = f"RANK={rank}".encode()
    for child in descendants(pid):
        with contextlib.suppress(OSError):
            if wanted in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                return child
    raise ProcessLookupError(f"no process has rank {rank}")
