"""The progress display of a run: a bar, lines of text, or JSON lines."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from ftk.terminal import bar_width, duration
from ftk.trainer.log.metrics import GREATEST_PERPLEXITY
from ftk.trainer.log.records import Record, to_json

EARLY_SECONDS = 10.0
"""After the first update that ends so long after the start, a line says the rate, if no record was shown before."""


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
    """One readable line for each record, and an early one on a slow machine."""

    def __init__(self, stream: TextIO, total_updates: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.stream = stream
        self.total_updates = total_updates
        self._clock = clock
        self._started: float | None = None  # until the first line is written
        self._before = self._num_updates = 0

    def start(self, num_updates: int) -> None:
        self._started = self._clock()
        self._before = self._num_updates = num_updates

    def update(self) -> None:
        self._num_updates += 1
        if self._started is None or (seconds := self._clock() - self._started) < EARLY_SECONDS:
            return
        pace = seconds / (self._num_updates - self._before)
        self._write(_early_line(self._num_updates, self.total_updates, pace))

    def show(self, record: Record) -> None:
        self._write(one_line(record, self.total_updates))

    def _write(self, line: str) -> None:
        self._started = None
        self.stream.write(line + "\n")
        self.stream.flush()


_BAR = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"
"""The form of the bar. Beside it 80 columns hold the figures of a million updates."""


class _Bar(tqdm):
    """Uses a monotonic clock: if the system clock is set back, tqdm's own would not update the bar for hours."""

    monitor_interval = 0  # tqdm's monitor thread uses the system clock

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._time = time.monotonic
        self.start_t = self.last_print_t = time.monotonic()


class BarProgress(Progress):
    """A line for each record, as without a terminal, above a bar with rate, time left and the last figures."""

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
            bar_format=_BAR,
            smoothing=0.1,
            **bar_width(self.stream),
        )
        # Log lines are printed above the bar.
        self._redirection = logging_redirect_tqdm(tqdm_class=tqdm)
        self._redirection.__enter__()

    def update(self) -> None:
        self._bar.update(1)

    def show(self, record: Record) -> None:
        if record["event"] == "train":
            self._bar.set_postfix_str(_short_figures(record), refresh=False)
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


def _early_line(num_updates: int, total_updates: int | None, pace: float) -> str:
    """`train | update 3/1000 | 4.1 s/update | left 1:08:10`, before there are figures."""
    total = f"/{total_updates}" if total_updates else ""
    left = f" | left {duration((total_updates - num_updates) * pace)}" if total_updates else ""
    return f"train | update {num_updates}{total} | {pace:.2g} s/update{left}"


def _short_figures(record: Record) -> str:
    """`loss=4.71, tok/s=4.33k`."""
    rate = record.get("tokens_per_second", math.nan)
    figures = {
        "loss": f"{record.get('loss', math.nan):.2f}",
        "tok/s": tqdm.format_sizeof(rate) if math.isfinite(rate) else "-",
    }
    return ", ".join(f"{name}={value}" for name, value in figures.items())


_FORMATS = {
    # record's field: (name, format)
    "loss": ("loss", "{:.4f}"),
    "ppl": ("ppl", "{:.2f}"),
    "lr": ("lr", "{:.3g}"),
    "gnorm": ("gnorm", "{:.3f}"),
    "tokens_per_second": ("tok/s", "{:.0f}"),
    "target_tokens_per_second": ("targets/s", "{:.0f}"),
    "data_share": ("data", "{:.1%}"),
}

_SHOWN = ("accuracy", "margin", "reward_chosen", "reward_rejected")
"""Meters of criterions that training is followed by as by its loss."""


def _figures(record: Record) -> dict[str, str]:
    """The figures of a record in display order: those of `_FORMATS`, losses, validation metrics, skipped updates."""
    figures = {}
    for key, (name, form) in _FORMATS.items():
        if key in record:
            value = record[key]
            figures[name] = form.format(value) if value is not None and math.isfinite(value) else "-"
    if record.get("ppl") == GREATEST_PERPLEXITY:  # or more
        figures["ppl"] = f">{GREATEST_PERPLEXITY:.3g}"
    for key, value in record.items():
        is_metric = record["event"] == "valid" and not any(part in key for part in ("ppl", "seconds", "num_"))
        if (
            key not in _FORMATS
            and ("loss" in key or key in _SHOWN or key.startswith("teacher_") or is_metric)
            and isinstance(value, float)
        ):
            figures[key] = f"{value:.4f}"
    if record.get("skipped_updates"):
        figures["skipped"] = str(record["skipped_updates"])
    return figures
