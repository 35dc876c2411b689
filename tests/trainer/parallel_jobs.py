"""Several `ftk-train` runs one after the other in the same processes: `run_records`.

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
import shlex
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from ftk.model_parallel import world
from ftk_cli.train import main
from tests.distributed import run_jobs


def run_records(
    data: Path, folder: Path, runs: Iterable[tuple[str, int, str]]
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, int]]:
    """Train on `data` into FOLDER/NAME, for each (NAME, processes, flags); one start for each number of processes.

    Returns:
        By name what the runs record, and how many graphs they compile.
    """
    records: dict[str, list[dict[str, Any]]] = {}
    graphs = {}
    runs = list(runs)
    for size in sorted({size for _, size, _ in runs}):
        own = [(name, flags) for name, of, flags in runs if of == size]
        given = [str(data), "--log-format", "json", "--save-dir"]
        jobs = [[*given, str(folder / name), *shlex.split(flags)] for name, flags in own]
        done = run_jobs(run_all, size, jobs)
        assert done.returncode == 0, done.stderr
        for line in map(json.loads, done.stdout.splitlines()):
            if "job" in line:
                name, _ = own[line["job"]]
                records.setdefault(name, [])
            elif "graphs" in line:
                graphs[name] = line["graphs"]
            else:
                records[name].append(line)
    return records, graphs


def picked(records: list[dict[str, Any]], figures: Collection[str]) -> list[dict[str, Any]]:
    """Those figures of the records that have a loss."""
    return [{name: one[name] for name in figures if name in one} for one in records if "loss" in one]


def run_all(jobs: list[list[str]]) -> int:
    speaks, seconds = os.environ.get("RANK", "0") == "0", world.GLOO_SECONDS
    torch.compile = functools.partial(torch.compile, backend="aot_eager")
    for number, job in enumerate(jobs):
        if speaks:
            print(json.dumps({"job": number}), flush=True)
        world.GLOO_SECONDS = seconds if number == len(jobs) - 1 else 0.0  # only an interpreter that ends needs the wait
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
