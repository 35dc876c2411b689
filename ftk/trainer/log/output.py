"""The output of a run besides checkpoints: log, progress, records, starts; written by the main rank."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

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
    """Writes log lines and records; a context manager, in which log files are open.

    The main rank writes for all. With `log_all_ranks` DIR each rank, the main one too, writes its log lines to
    `DIR/rank_N.log`.

    Args:
        held_lines: earlier log lines, for the log files.

    Raises:
        UserError: a file cannot be written, or a needed package is missing; on every rank.
    """

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        state: TrainerState,
        total_updates: int | None,
        world: World,
        held_lines: HeldLines | None = None,
    ) -> None:
        self._held_lines = held_lines
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
                if options.log_file is not None:
                    self._log_files.append(LogFile(options.log_file, total_updates))
            if options.log_all_ranks is not None:
                own = str(Path(options.log_all_ranks) / f"rank_{world.rank}.log")
                self._log_files.append(LogFile(own, total_updates, flag="`log_all_ranks`"))

        collective(world, open_all)
        self._open = contextlib.ExitStack()

    def __enter__(self) -> RunOutput:
        held = self._held_lines.take() if self._held_lines is not None else []
        for log_file in self._log_files:
            self._open.enter_context(log_file).write(held)
        return self

    def __exit__(self, *error: object) -> None:
        self._open.close()

    def begin(self, num_updates: int) -> None:
        """Record the start of this process, after `num_updates` updates."""
        if self._starts is not None:
            self._starts.begin(num_updates)

    def start_progress(self, num_updates: int) -> None:
        """Start the progress display."""
        self._display(lambda: self._progress.start(num_updates))

    def update(self) -> None:
        """Show one more update; called on every update, so it must be fast."""
        self._display(self._progress.update)

    def show(self, record: Record) -> None:
        """Write a training or validation record."""
        self._records.write(record)
        self._display(lambda: self._progress.show(record))
        for log_file in self._log_files:
            log_file.show(record)

    def close(self) -> None:
        """Close the progress display and the records."""
        self._display(self._progress.close)
        self._records.close()

    def end(self, num_updates: int, reason: str) -> None:
        """Record the end of this process."""
        if self._starts is not None:
            self._starts.end(num_updates, reason)

    def _display(self, call: Callable[[], None]) -> None:
        """Call a display method. A closed terminal or a full disk does not end the run; a closed pipe does."""
        try:
            call()
        except BrokenPipeError:
            raise
        except OSError as error:
            self._progress = Progress()
            logger.error("progress can no longer be shown (%s); metrics.jsonl has the figures", reason(error))
            # Python flushes the buffer at exit, which would fail again.
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as null:  # stdout may be no file
                os.dup2(null.fileno(), sys.stdout.fileno())
