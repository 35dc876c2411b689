"""What a run has recorded."""

from __future__ import annotations

from pathlib import Path

from ftk.trainer.log.records import Record, read_records


def records_of(run: Path, event: str | None = None) -> list[Record]:
    """All of a run's folder, or those of an event ("train", "valid")."""
    return [record for record in read_records(run / "metrics.jsonl") if event in (None, record["event"])]


def losses_of(run: Path, event: str = "train") -> list[float]:
    return [record["loss"] for record in records_of(run, event)]
