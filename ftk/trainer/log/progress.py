"""The progress display of a run: a bar, lines of text, or JSON lines."""

from __future__ import annotations

import math
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ftk.trainer.log.records import Record, to_json


def make_progress(
    log_format: str, total_updates: int | None, stdout: TextIO | None = None, stderr: TextIO | None = None
) -> Progress:
    """The progress display of a format.

    Args:
        log_format: tqdm, simple or json; without a terminal, tqdm becomes simple.
        total_updates: length of the run, for the time left.
        stdout: for lines; default sys.stdout.
        stderr: for the bar; default sys.stderr.
    """
    stdout, stderr = stdout or sys.stdout, stderr or sys.stderr
    if log_format == "json":
        return JsonProgress(stdout)
    if log_format == "tqdm" and stderr.isatty():
        return BarProgress(stderr, total_updates)
    return SimpleProgress(stdout, total_updates)


class Progress:
    """The interface of a display; this one shows nothing."""

    def start(self, num_updates: int) -> None:
        """Training starts or continues after `num_updates` updates."""

    def update(self) -> None:
        """One more update is done; called on every update, so it must be fast."""

    def show(self, record: Record) -> None:
        """Show a training or validation record."""

    def close(self) -> None:
        """Training has ended."""


class JsonProgress(Progress):
    """One JSON object per line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def show(self, record: Record) -> None:
        self.stream.write(to_json(record) + "\n")
        self.stream.flush()


class SimpleProgress(Progress):
    """One readable line for each record."""

    def __init__(self, stream: TextIO, total_updates: int | None) -> None:
        self.stream = stream
        self.total_updates = total_updates

    def show(self, record: Record) -> None:
        self.stream.write(one_line(record, self.total_updates) + "\n")
        self.stream.flush()


class _Bar(tqdm):
    """Uses a monotonic clock: if the system clock is set back, tqdm's own would not update the bar for hours."""

    monitor_interval = 0  # tqdm's monitor thread uses the system clock

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._time = time.monotonic
        self.start_t = self.last_print_t = time.monotonic()


class BarProgress(Progress):
    """A bar with rate, time left and the last figures; a line for each validation."""

    def __init__(self, stream: TextIO, total_updates: int | None) -> None:
        self.stream = stream
        self.total_updates = total_updates
        self._bar: Any = None
        self._redirection: Any = None

    def start(self, num_updates: int) -> None:
        self._bar = _Bar(
            total=self.total_updates,
            initial=num_updates,
            unit="update",
            file=self.stream,
            dynamic_ncols=True,
            smoothing=0.1,
        )
        # Log lines are printed above the bar.
        self._redirection = logging_redirect_tqdm(tqdm_class=tqdm)
        self._redirection.__enter__()

    def update(self) -> None:
        self._bar.update(1)

    def show(self, record: Record) -> None:
        if record["event"] == "train":
            shown = ("loss", "lr", "tok/s")
            figures = {name: text for name, text in _figures(record).items() if name in shown}
            self._bar.set_description(f"epoch {record['epoch']}", refresh=False)
            self._bar.set_postfix(figures)
        else:
            self._bar.write(one_line(record, self.total_updates), file=self.stream)

    def close(self) -> None:
        if self._bar is not None:
            self._redirection.__exit__(None, None, None)
            self._bar.close()
            self._bar = None


def one_line(record: Record, total_updates: int | None = None) -> str:
    """A record as a readable line: `train | update 100/2000 | epoch 1 | loss 5.123 | ...`."""
    subset = f" {record['subset']}" if record.get("subset", record["event"]) != record["event"] else ""
    total = f"/{total_updates}" if total_updates else ""
    parts = [f"{record['event']}{subset}", f"update {record['num_updates']}{total}"]
    parts.append(f"epoch {record['epoch']}")
    parts += [f"{name} {text}" for name, text in _figures(record).items()]
    if record["event"] == "train" and total_updates and record.get("updates_per_second"):
        left = (total_updates - record["num_updates"]) / record["updates_per_second"]
        parts.append(f"left {duration(left)}")
    return " | ".join(parts)


_FORMATS = {
    # record's field: (name, format)
    "loss": ("loss", "{:.4f}"),
    "ppl": ("ppl", "{:.2f}"),
    "lr": ("lr", "{:.3g}"),
    "gnorm": ("gnorm", "{:.3f}"),
    "tokens_per_second": ("tok/s", "{:.0f}"),
    "target_tokens_per_second": ("target tok/s", "{:.0f}"),
    "data_share": ("data", "{:.1%}"),
}


def _figures(record: Record) -> dict[str, str]:
    """The figures of a record in display order: those of `_FORMATS`, losses of groups, skipped updates."""
    figures = {}
    for key, (name, form) in _FORMATS.items():
        if key in record:
            value = record[key]
            figures[name] = form.format(value) if value is not None and math.isfinite(value) else "-"
    for key, value in record.items():
        if key not in _FORMATS and "loss" in key and isinstance(value, float):
            figures[key] = f"{value:.4f}"
    if record.get("skipped_updates"):
        figures["skipped"] = str(record["skipped_updates"])
    return figures


def duration(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
