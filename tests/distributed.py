"""Real gloo processes for tests: a function is run on every rank of a small world."""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import forked


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
    # The ranks meet at a store of this process, as those of torchrun do at its agent's: a port that a rank was to open
    # could be another one's by then.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [forked(_run, function, rank, size, store.port, folder, arguments) for rank in range(size)]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout
        try:
            while any(process.is_alive() for process in ranks):
                if any(process.exitcode for process in ranks) or time.monotonic() > deadline:
                    break
                time.sleep(0.02)
            failures = sorted(Path(folder).glob("*.failure"), key=lambda path: path.stat().st_mtime_ns)
            if failures:
                raise AssertionError(f"rank {failures[0].stem} failed:\n{failures[0].read_text()}")
            codes = [process.exitcode for process in ranks]
            assert not any(code is None for code in codes), f"not done after {timeout} seconds: exit codes {codes}"
            assert not any(codes), f"exit codes of the ranks: {codes}"
            return [json.loads((Path(folder) / f"{rank}.result").read_text()) for rank in range(size)]
        finally:
            for process in ranks:
                process.kill()
                process.join()


def _run(
    function: Callable[..., Any], rank: int, size: int, port: int, folder: str, arguments: tuple[Any, ...]
) -> None:
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
