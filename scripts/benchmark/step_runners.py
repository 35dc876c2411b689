"""Where a way takes its steps: in this process on a GPU, in one of its own on a CPU.

A CPU's memory is the process's: how the C library deals with freed blocks is chosen for a whole process
(`ftk.model_parallel.engine.prepare_process`), and peak memory is counted for it. So each way has a process there,
which waits while the others take their turns.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from matrix_rate import synchronize
from step_ways import Way, build_step, train_config

from ftk.model_parallel.engine import prepare_process
from ftk.trainer.watch.hardware import peak_resident_bytes

Batches = list[dict[str, torch.Tensor]]


class Runner(Protocol):
    """A way with its model, which has taken its first updates.

    Attributes:
        losses: of these updates.
        memory_mb: peak memory until then, over what there was before the model.
    """

    losses: list[float]
    memory_mb: float

    def seconds(self, count: int) -> float:
        """Seconds per update, over a number of updates."""

    def close(self) -> None:
        """Give its memory back."""


class InThisProcess:
    """For a GPU.

    Args:
        way: which.
        config: of the model.
        batches: the first updates take each of them once.
        device: the GPU.
    """

    def __init__(self, way: Way, config: Any, batches: Batches, device: torch.device) -> None:
        self.way, self.batches, self.device = way, batches, device
        self.close()
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        prepare_process(train_config(way).engine)
        self.step = build_step(way, config, device)
        self.losses = [float(self.step.step(batch)) for batch in batches]
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
        self.memory_mb = (peak - before) / 1e6

    def seconds(self, count: int) -> float:
        prepare_process(train_config(self.way).engine)
        synchronize(self.device)
        began = time.perf_counter()
        for number in range(count):
            self.step.step(self.batches[number % len(self.batches)])
        synchronize(self.device)
        return (time.perf_counter() - began) / count

    def close(self) -> None:
        self.__dict__.pop("step", None)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class InItsOwnProcess:
    """For a CPU.

    Args:
        way: which.
        arguments: of `train_step.py`, which say size, batch and threads.

    Raises:
        RuntimeError: the process failed; with its last output.
    """

    def __init__(self, way: Way, arguments: Sequence[str]) -> None:
        command = [sys.executable, str(Path(__file__).with_name("train_step.py"))]
        command += ["--serve", json.dumps(way.__dict__), *arguments]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        first = self._answer()
        self.losses, self.memory_mb = first["losses"], first["memory_mb"]

    def seconds(self, count: int) -> float:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{count}\n")
        self.process.stdin.flush()
        return float(self._answer()["seconds"])

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            errors = self.process.communicate()[1].strip().splitlines()
            raise RuntimeError(errors[-1] if errors else f"ended with {self.process.returncode}")
        return json.loads(line)


def serve(way: Way, build: Callable[[], tuple[Any, Batches]], warm_up: Callable[[Way], None]) -> None:
    """What the process of `InItsOwnProcess` does: says losses and memory, then seconds for each count it is given.

    The original's way leaves the C library as it is; ftk's does what ftk-train does.

    Args:
        build: gives the model's config and the batches.
        warm_up: takes a step of a tiny model, so that libraries have loaded what they need.
    """
    if way.whose == "ftk":
        prepare_process(train_config(way).engine)
    config, batches = build()
    warm_up(way)
    gc.collect()
    before = resident_bytes()
    step = build_step(way, config, torch.device("cpu"))
    losses = [float(step.step(batch)) for batch in batches]
    print(json.dumps({"losses": losses, "memory_mb": (peak_resident_bytes() - before) / 1e6}), flush=True)
    for line in sys.stdin:
        count = int(line)
        began = time.perf_counter()
        for number in range(count):
            step.step(batches[number % len(batches)])
        print(json.dumps({"seconds": (time.perf_counter() - began) / count}), flush=True)


def resident_bytes() -> int:
    """Resident memory of this process now; where the system does not report it, the peak."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    except OSError:
        return peak_resident_bytes()
    return pages * os.sysconf("SC_PAGE_SIZE")
