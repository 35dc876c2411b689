"""The progress of ftk-preprocess where stderr is no terminal: whole lines, and none of a short run."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from ftk.data.text import preprocess_progress
from ftk.data.text.preprocess_progress import ReadingProgress
from ftk.data.text.shards import Share


def read_two_files(monkeypatch: pytest.MonkeyPatch, seconds_per_line: float) -> str:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(preprocess_progress, "_SECONDS_PER_LINE", seconds_per_line)
    shares = Share(("a.txt",), 0, None, 3_000_000), Share(("b.txt",), 0, None, 1_000_000)
    with ReadingProgress("train", shares) as progress:
        blocks = ("a.txt", 3_000_000, 30), ("b.txt", 400_000, 35), ("b.txt", 1_000_000, 40)
        for source, num_bytes, documents in blocks:
            progress.show(SimpleNamespace(source=source, disk_bytes=num_bytes), documents)
    return stream.getvalue()


def test_a_log_file_gets_lines(monkeypatch):
    shown = read_two_files(monkeypatch, 0.0)
    assert "\r" not in shown
    lines = shown.splitlines()
    shares = [line.split(",")[0] for line in lines]
    assert shares[0] == "train: 0 % of 4.00MB"
    assert {"train: 75 % of 4.00MB", "train: 85 % of 4.00MB", "train: 100 % of 4.00MB"} <= set(shares)
    assert all(line.endswith(" left") for line in lines)
    assert "documents/s" in lines[-1]


def test_a_short_run_says_nothing_on_the_way(monkeypatch):
    assert read_two_files(monkeypatch, 10.0) == ""
