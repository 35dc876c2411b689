"""Runs of the tasks cloze and classification: their flags, and what several ranks find beside one process."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.trainer.parallel_jobs import picked, run_records

PARALLEL = {
    "one": (1, "--batch-size 6 --update-freq 2"),
    "R2": (2, "--batch-size 6"),
    "T2": (2, "--batch-size 6 --update-freq 2 --tensor-parallel-size 2"),
    "P2": (2, "--batch-size 6 --update-freq 2 --pipeline-parallel-size 2"),
    "S2": (2, "--batch-size 6 --data-parallel-shard-size 2"),
}


def learning(task: str, base: Path) -> list[object]:
    """Flags of a run that learns rows by heart, from a model."""
    usual = ["--lr", 3e-3, "--lr-scheduler", "constant", "--batch-size", 8, "--device", "cpu", "--clip-norm", 1]
    usual += ["--log-interval", 1, "--seq-length", {"cloze": 64, "classification": 32}[task]]
    return ["--task", task, "--finetune-from", base, *usual]


def assert_ranks_agree(
    data: Path,
    folder: Path,
    flags: list[object],
    figures: Collection[str],
    layouts: dict[str, tuple[int, str]],
    least: int,
    rel: float = 1e-4,
) -> None:
    """That several ranks record the figures of one process, more than `least` times."""
    given = shlex.join(map(str, flags))
    records, _ = run_records(data, folder, [(name, size, f"{given} {own}") for name, (size, own) in layouts.items()])
    found = {name: picked(own, figures) for name, own in records.items()}
    assert len(found["one"]) > least
    for other in layouts:
        assert len(found[other]) == len(found["one"])
        for ours, theirs in zip(found[other], found["one"], strict=True):
            assert ours == pytest.approx(theirs, rel=rel), other
