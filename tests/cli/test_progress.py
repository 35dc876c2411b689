"""The bar on a terminal, of any width and of none."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import sys
import termios

import pytest

from ftk.trainer.log.progress import make_progress
from ftk_cli.progress import Meter, progress_bar


def everything(master):
    """What was written to a terminal whose other end is closed."""
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # the end, as Linux tells it
            part = b""
        if not part:
            os.close(master)
            return shown.decode()
        shown += part


@pytest.mark.parametrize(("columns", "longest"), [(0, 80), (76, 76), (100, 100)])
@pytest.mark.parametrize("total", [40, None])
def test_the_bar_shows_counts_rate_and_time_left_on_terminals_of_every_width(monkeypatch, columns, longest, total):
    master, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 25, columns, 0, 0))
    with os.fdopen(own, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress_bar(total, 10, "sample") as bar:
            bar.update(10)
            bar.set_postfix_str("12.5 tokens/s")
    shown = everything(master)
    lines = [line for line in shown.replace("\n", "\r").split("\r") if line.strip()]
    assert any("20/40" in line and "50%" in line if total else "20sample" in line for line in lines)
    assert any("12.5 tokens/s" in line for line in lines)
    assert max(map(len, lines)) <= longest
    if total:
        assert any("<" in line for line in lines)  # time that it took < time left


@pytest.mark.parametrize("columns", [0, 80])
def test_80_columns_hold_the_bar_of_a_training_run(monkeypatch, columns):
    master, own = pty.openpty()
    fcntl.ioctl(own, termios.TIOCSWINSZ, struct.pack("HHHH", 25 if columns else 0, columns, 0, 0))
    with os.fdopen(own, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)  # whose rows tqdm asks for
        progress = make_progress("tqdm", 1_000_000)
        progress.start(0)
        progress._bar.n, progress._bar.start_t = 654_320, progress._bar.start_t - 12 * 3600
        progress.update()
        progress.show(
            {"event": "train", "num_updates": 654_321, "epoch": 12, "loss": 5.12345, "tokens_per_second": 433_123.0}
        )
        progress.close()
    bars = [line for line in everything(master).replace("\n", "\r").split("\r") if "65%|" in line]
    assert len(bars) > 1
    assert max(map(len, bars)) <= 80
    assert re.search(r"\[12:00:0\d<.*update/s, loss=5.12, tok/s=433k\]$", bars[-1]), bars


def test_there_is_none_where_stderr_is_no_terminal(capsys):
    with progress_bar(40, 0) as bar:
        bar.update(40)
        bar.set_postfix_str("12.5 tokens/s")
    assert capsys.readouterr().err == ""


def test_a_meter_says_what_was_done_in_this_run_and_before():
    meter = Meter("prompt", 3, "went through")
    meter.begin()
    meter.add(20)
    meter.add(2)
    meter.add(3)
    assert meter.summary().startswith("went through 3 prompts (25 tokens) in ")
    assert "tokens/s), after 3 of an earlier run; loading took" in meter.summary()
    assert "earlier" not in Meter("prompt", 0).summary()
