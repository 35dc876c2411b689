"""`--profile N`: what the time of some updates goes to, operator by operator."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ftk.batch import Batch
from ftk.files import temporary_folder, write_whole
from ftk.trainer.hooks import Hook

if TYPE_CHECKING:
    from ftk.trainer.log.summary import Summary
    from ftk.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

ROWS = 10


class OperatorTime(NamedTuple):
    """What an operator took in all of its calls, without those that it called itself."""

    name: str
    calls: int
    cpu_ms: float
    gpu_ms: float


class Profile(Hook):
    """Profiles some successive updates of this process with torch.profiler.

    `profile_FIRST-LAST.json.gz` in the run's folder is a Chrome trace (chrome://tracing, https://ui.perfetto.dev) with
    the waiting for data between the updates; `profile_FIRST-LAST.txt`, which is also logged, has the dearest operators.

    Args:
        num_updates: how many are profiled.
        start: updates of this process that go before.
    """

    def __init__(self, num_updates: int, start: int) -> None:
        self._left = num_updates
        self._before = start
        self._profiler: profile | None = None
        self._range: record_function | None = None
        self._first = 0  # number of the first profiled update

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        if self._before > 0:
            self._before -= 1
        elif self._left > 0:
            number = trainer.state.num_updates + 1
            if self._profiler is None:
                self._first = number
                gpu = [ProfilerActivity.CUDA] if trainer.device.type == "cuda" else []
                self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
                self._profiler.start()
            self._enter(f"update {number}: forward and backward")

    def after_backward(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._enter(f"update {trainer.state.num_updates + 1}: optimizer")

    def after_step(self, trainer: Trainer) -> None:
        if self._profiler is not None:
            self._leave()
            self._left -= 1
            if self._left == 0:
                self._finish(trainer)

    def after_train(self, trainer: Trainer, summary: Summary) -> None:
        if self._profiler is not None:
            self._finish(trainer)
        elif self._left > 0:
            logger.warning("--profile: nothing was profiled, the run ended before; lower --profile-start")

    def _enter(self, name: str) -> None:
        self._leave()
        self._range = record_function(name)
        self._range.__enter__()

    def _leave(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _finish(self, trainer: Trainer) -> None:
        assert self._profiler is not None
        with trainer.stopwatch.aside(), trainer.stopwatch.part("log"):
            if trainer.device.type == "cuda":
                torch.cuda.synchronize(trainer.device)
            self._profiler.stop()
            profiler, self._profiler, self._left = self._profiler, None, 0
            last = trainer.state.num_updates
            trace = trainer.checkpoints.folder / f"profile_{self._first}-{last}.json.gz"
            table = describe(operator_times(profiler), last - self._first + 1)
            title = f"profile of updates {self._first} to {last}"
            logger.info("%s\n%s", title, table)
            try:
                _write(profiler, trace, f"{title}\n{table}\n")
            except (OSError, RuntimeError) as error:  # a full disk, say: no profile is worth a run
                logger.error("%s: the profile could not be written: %s", trace, error)


def operator_times(profiler: profile) -> list[OperatorTime]:
    """The operators of a profile, the dearest first: by GPU time, if there is any."""
    # On a GPU kernels have rows of their own, whose time is that of the operators already; ranges are no operators.
    rows = [row for row in profiler.key_averages() if _is_on_host(row) and not row.is_user_annotation]
    times = [
        OperatorTime(row.key, row.count, row.self_cpu_time_total / 1e3, row.self_device_time_total / 1e3)
        for row in rows
    ]
    on_gpu = any(time.gpu_ms for time in times)
    return sorted(times, key=lambda time: time.gpu_ms if on_gpu else time.cpu_ms, reverse=True)


def describe(times: list[OperatorTime], num_updates: int) -> str:
    """The table of the dearest operators: calls and self time of all `num_updates` updates, share of the whole."""
    cpu, gpu = sum(time.cpu_ms for time in times) or 1.0, sum(time.gpu_ms for time in times)
    width = max([8, *(len(time.name[:60]) for time in times[:ROWS])])
    head = f"{'operator':<{width}}  {'calls':>7}  {'CPU ms':>10}  {'share':>6}"
    lines = [head + (f"  {'GPU ms':>10}  {'share':>6}" if gpu else "")]
    for time in times[:ROWS]:
        line = f"{time.name[:60]:<{width}}  {time.calls:>7}  {time.cpu_ms:>10.3f}  {time.cpu_ms / cpu:>6.1%}"
        lines.append(line + (f"  {time.gpu_ms:>10.3f}  {time.gpu_ms / gpu:>6.1%}" if gpu else ""))
    each = f"{cpu / num_updates:.3f} ms CPU" + (f", {gpu / num_updates:.3f} ms GPU" if gpu else "")
    return "\n".join([*lines, f"self time in all {num_updates} updates; all operators together, per update: {each}"])


def _is_on_host(row: Any) -> bool:
    return row.device_type == torch.autograd.DeviceType.CPU


def _write(profiler: profile, trace: Path, table: str) -> None:
    # Written beside and renamed, so that a trace that is there is whole; torch packs by the name's end.
    with temporary_folder(trace) as folder:
        profiler.export_chrome_trace(str(folder / trace.name))
        os.replace(folder / trace.name, trace)
    write_whole(trace.with_name(trace.name.removesuffix(".json.gz") + ".txt"), table)
    logger.info("trace: %s (open it in https://ui.perfetto.dev)", trace)
