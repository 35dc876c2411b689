"""All that a run writes of its own accord besides checkpoints: log, progress, records, starts. One process does it."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ftk.files import reason
from ftk.model_parallel.collective import collective
from ftk.model_parallel.world import World
from ftk.report.starts import Starts
from ftk.trainer.config import TrainConfig
from ftk.trainer.log.log_file import HeldLines, LogFile
from ftk.trainer.log.progress import Progress, make_progress
from ftk.trainer.log.records import Record
from ftk.trainer.log.sinks import RecordSinks, open_records
from ftk.trainer.state import TrainerState

logger = logging.getLogger(__name__)


class RunOutput:
    """Where a run's log lines and records go; entered, log files are open.

    The main process writes for all. With `--log-all-ranks DIR` each process, the main one too, keeps its own log lines
    in `DIR/rank_N.log`.

    Args:
        config: of the run.
        folder: of the run.
        state: where the run stands.
        total_updates: its length.
        world: the processes of the run.
        said: what was logged until now, for the log files.

    Raises:
        UserError: a file cannot be written, or a package that is asked for is missing; on every process.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        state: TrainerState,
        total_updates: int | None,
        world: World,
        said: HeldLines | None = None,
    ) -> None:
        self._said = said
        self._progress = Progress()
        self._records = RecordSinks([])
        self._starts: Starts | None = None
        self._log_files: list[LogFile] = []

        def open_all() -> None:
            options = config.logging
            if world.is_main:
                self._records = open_records(config, folder, state)
                self._starts = Starts(folder)
                self._progress = make_progress(options.log_format, total_updates)
                self._log_files.append(LogFile(options.log_file, total_updates))
            if options.log_all_ranks is not None:
                own = str(Path(options.log_all_ranks) / f"rank_{world.rank}.log")
                self._log_files.append(LogFile(own, total_updates, flag="--log-all-ranks"))

        collective(world, open_all)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RunOutput:
        said = self._said.take() if self._said is not None else []
        for log_file in self._log_files:
            self._open.enter_context(log_file).write(said)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def begin(self, num_updates: int) -> None:
        """This start of the run begins, after so many updates."""
        if self._starts is not None:
            self._starts.begin(num_updates)

    def start_progress(self, num_updates: int) -> None:
        """The first update is about to begin."""
        self._display(lambda: self._progress.start(num_updates))

    def update(self) -> None:
        """One more update is done. Called on every update: costs nothing."""
        self._display(self._progress.update)

    def show(self, record: Record) -> None:
        """A training or validation record is due."""
        self._records.write(record)
        self._display(lambda: self._progress.show(record))
        for log_file in self._log_files:
            log_file.show(record)

    def close(self) -> None:
        """No more records will come."""
        self._display(self._progress.close)
        self._records.close()

    def end(self, num_updates: int, reason: str) -> None:
        """This start of the run has ended."""
        if self._starts is not None:
            self._starts.end(num_updates, reason)

    def _display(self, call: Callable[[], None]) -> None:
        """A terminal that is gone, or a full disk behind standard output, is no end of a run; a closed pipe is."""
        try:
            call()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._progress = Progress()
            logger.error("progress cannot be shown any more (%s); metrics.jsonl has the figures", reason(error))
            # What waits in the buffer would be a failure once more when Python ends.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:  # or it is no file at all
                os.dup2(nothing.fileno(), sys.stdout.fileno())
