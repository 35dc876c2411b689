"""Real gloo processes for tests: a function is run on every rank of a small world."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tests.processes import forked, redirect


def run_ranks(function: Callable[..., Any], size: int, *arguments: Any, timeout: float = 300.0) -> list[Any]:
    """Run `function(*arguments)` in `size` processes that are ranks of one gloo group on this machine.

    The function stands at the top of a module; it finds the group by `torch.distributed`, and RANK, WORLD_SIZE,
    LOCAL_RANK and the rest of torchrun's variables in its environment.

    Returns:
        What each rank returned, by rank; it has to be what JSON holds.

    Raises:
        AssertionError: a rank failed, with the traceback of the first one that did, or they took longer than `timeout`
            seconds. No process is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        codes = _start(_run, size, timeout, folder, function, arguments)
        failures = sorted(Path(folder).glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
        if failures:
            raise AssertionError(f"rank {failures[0].stem} failed:\n{failures[0].read_text()}")
        assert not any(code is None for code in codes), f"not done after {timeout} seconds: exit codes {codes}"
        assert not any(codes), f"exit codes of the ranks: {codes}"
        return [json.loads((Path(folder) / f"{rank}.result").read_text()) for rank in range(size)]


class Ended(NamedTuple):
    """What ranks leave: their exit codes, and what all of them wrote."""

    codes: list[int]
    stdout: str
    stderr: str

    @property
    def returncode(self) -> int:
        """The first that is not 0."""
        return next(filter(None, self.codes), 0)


def run_main(main: Callable[[Any], int], arguments: Sequence[Any], *, cwd: Path | None = None) -> Ended:
    """Run `main(arguments[rank])` of a command in the ranks of one world, as if torchrun had started them.

    Each rank runs to its end, whatever the exit code of the others; one alone is started as without torchrun.

    Args:
        arguments: of each rank.
        cwd: the ranks' working directory; None: this process's.

    Raises:
        AssertionError: an exception left `main`, or the ranks took longer than ten minutes; no process is left behind.
    """
    size = len(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = _start(_run_main, size, 600.0, name, os.fspath(cwd or Path.cwd()), main, arguments)
        stdout, stderr = ((folder / stream).read_text(encoding="utf-8") for stream in ("stdout", "stderr"))
        ends = [folder / f"{rank}.code" for rank in range(size)]
        assert all(path.exists() for path in ends), f"exit codes of the ranks: {codes}\n{stderr}"
        return Ended([int(path.read_text()) for path in ends], stdout, stderr)


def run_jobs(function: Callable[[list[list[str]]], int], size: int, jobs: list[list[str]]) -> Ended:
    """Run `function(jobs)`, which returns an exit code, in `size` ranks; see `run_main`."""
    return run_main(function, [jobs] * size)


def _start(function: Callable[..., Any], size: int, timeout: float, *arguments: Any) -> list[int | None]:
    """Exit codes of `function(rank, size, port, *arguments)`, by rank; None of one that had to be killed."""
    # The ranks meet at a store of this process, as those of torchrun do at its agent's: a port that a rank was to open
    # could be another one's by then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [forked(function, rank, size, store.port, *arguments) for rank in range(size)]
    deadline = time.monotonic() + timeout
    try:
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            if any(process.exitcode for process in ranks) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        return [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.pid is not None:
                process.kill()
                process.join()


def _set_environment(rank: int, size: int, port: int) -> None:
    """The variables that torchrun sets."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    torch.set_num_threads(1)


def _run(
    rank: int, size: int, port: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    _set_environment(rank, size, port)
    try:
        dist.init_process_group("gloo")
        result = function(*arguments)
        (Path(folder) / f"{rank}.result").write_text(json.dumps(result))
        dist.barrier()  # torch aborts now and then where ranks end at different times
        dist.destroy_process_group()
    except BaseException:
        partial = Path(folder) / f"{rank}.part"
        partial.write_text(traceback.format_exc())
        partial.rename(Path(folder) / f"{rank}.failure")
        os._exit(1)


def _run_main(
    rank: int, size: int, port: int, folder: str, cwd: str, main: Callable[[Any], int], arguments: Sequence[Any]
) -> None:
    if size > 1:
        _set_environment(rank, size, port)
        error_file = Path(folder) / str(rank) / "error.json"  # as torchrun has it: the folder above is of all ranks
        error_file.parent.mkdir()
        os.environ["TORCHELASTIC_ERROR_FILE"] = str(error_file)
    redirect(str(Path(folder) / "stdout"), 1)
    redirect(str(Path(folder) / "stderr"), 2)
    os.chdir(cwd)
    code = main(arguments[rank])
    sys.stdout.flush()
    (Path(folder) / f"{rank}.code").write_text(str(code))
