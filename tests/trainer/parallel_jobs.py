"""Several `ftk-train` runs one after the other in the same processes.

`run_jobs(run_all, size, [["DATA", "--save-dir", ...], ...])`: each job's JSON log goes to stdout of the main process,
before it a line with the job's number, after it one with the number of graphs that it compiled.

Graphs are compiled by AOTAutograd alone: Inductor's C++ takes a minute for the blocks of one job, and knows nothing of
processes. (`tests/model_parallel/test_data_parallel_compiled.py` has it.)
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ftk_cli.train import main


def run_all(jobs: list[list[str]]) -> int:
    speaks = os.environ.get("RANK", "0") == "0"
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for number, job in enumerate(jobs):
        if speaks:
            print(json.dumps({"job": number}), flush=True)
        if (code := main(job)) != 0:
            return code
        if speaks:
            print(json.dumps({"graphs": graphs_compiled()}), flush=True)
    return 0


def samples_per_epoch(command: Callable[..., Any], data: Path, *flags: str) -> int:
    """What `--dry-run` says; `command` is the fixture."""
    said = command("ftk-train", data, *flags, "--batch-size", 1, "--save-dir", data / "none", "--dry-run").stdout
    return int(re.search(r"^samples per epoch +([\d,]+)$", said, re.MULTILINE)[1].replace(",", ""))


def graphs_compiled() -> int:
    """Since the last call."""
    if "torch._dynamo" not in sys.modules:
        return 0
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    counters.clear()
    torch._dynamo.reset()
    return graphs
