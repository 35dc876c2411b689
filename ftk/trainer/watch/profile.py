"""`profile` N: a profile of N updates by torch.profiler."""

from __future__ import annotations

import logging
import os

from torch.profiler import ProfilerActivity, profile

from ftk.batch import Batch
from ftk.files import temporary_folder, write_whole
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.log.summary import Summary

logger = logging.getLogger(__name__)

ROWS = 10


class Profile(Hook):
    """Profiles successive updates of this process.

    `profile_FIRST-LAST.json.gz` in the run's folder is a trace for https://ui.perfetto.dev, which includes the time
    between updates; `profile_FIRST-LAST.txt`, which is also logged, lists the most expensive operators.

    Args:
        start: updates of this process before the profiled ones.
    """

    def __init__(self, num_updates: int, start: int) -> None:
        self._start = start
        self._end = start + num_updates
        self._done = 0  # updates of this process
        self._profiler: profile | None = None

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        if self._done == self._start:
            gpu = [ProfilerActivity.CUDA] if step.device.type == "cuda" else []
            self._profiler = profile(activities=[ProfilerActivity.CPU, *gpu])
            self._profiler.start()

    def after_step(self, step: StepInfo) -> None:
        self._done += 1
        if self._done == self._end:
            self._finish(step)

    def after_train(self, step: StepInfo, summary: Summary) -> None:
        if self._done <= self._start:
            logger.warning("`profile`: nothing was profiled, the run ended too early; lower `profile_start`")
        self._finish(step)

    def _finish(self, step: StepInfo) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        with step.stopwatch.aside(), step.stopwatch.part("log"):
            profiler.stop()
            last = step.num_updates
            first = last - self._done + self._start + 1
            kind = "cuda" if step.device.type == "cuda" else "cpu"
            table = profiler.key_averages().table(sort_by=f"self_{kind}_time_total", row_limit=ROWS)
            text = f"profile of updates {first} to {last}\n{table}"
            logger.info("%s", text)
            trace = step.folder / f"profile_{first}-{last}.json.gz"
            try:
                # Renamed, so that the trace is complete or absent; torch compresses it because of its extension.
                with temporary_folder(trace) as folder:
                    profiler.export_chrome_trace(str(folder / trace.name))
                    os.replace(folder / trace.name, trace)
                write_whole(trace.with_name(f"profile_{first}-{last}.txt"), text)
            except (OSError, RuntimeError) as error:  # such as a full disk, which must not end the run
                logger.error("%s: the profile could not be written: %s", trace, error)
                return
            logger.info("trace: %s (open it in https://ui.perfetto.dev)", trace)
