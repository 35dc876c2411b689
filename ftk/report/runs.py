"""Reading a run's folder for the report: figures, configuration, starts. Nothing in it is trusted."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, MutableSequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftk.config import load_yaml
from ftk.errors import UserError
from ftk.files import as_user_error, read_lines
from ftk.report.starts import FILE_NAME, read_starts

MAX_RECORD_BYTES = 1 << 20
"""No record is longer: a longer line is read as one that is none."""


def _numbers() -> array[float]:
    """8 bytes per number: a run may have a million records."""
    return array("d")


@dataclass
class Curve:
    """One figure over a run, in the order of the updates.

    Attributes:
        updates: num_updates of each point.
        hours: training time of each point; NaN where the record has none.
        values: NaN where the record has null.
    """

    updates: MutableSequence[float] = field(default_factory=_numbers)
    hours: MutableSequence[float] = field(default_factory=_numbers)
    values: MutableSequence[float] = field(default_factory=_numbers)

    def __len__(self) -> int:
        return len(self.values)


@dataclass
class Run:
    """The content of a run's folder.

    Attributes:
        name: shown for the run.
        folder: where it is.
        curves: (event, figure) -> curve; the event is "train", or "valid" with the split's name: "valid test".
        last: event -> its last record.
        num_records, broken_lines: lines of metrics.jsonl that are records, and that are none.
        config: tree of config.yaml; empty if there is none.
        starts: of environment.json; empty if there is none.
    """

    name: str
    folder: Path
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    last: dict[str, dict[str, Any]] = field(default_factory=dict)
    num_records: int = 0
    broken_lines: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    starts: list[dict[str, Any]] = field(default_factory=list)

    def splits(self) -> list[str]:
        """Events of validation, in the order in which they came: "valid", "valid test"."""
        return [event for event in self.last if event != "train"]

    def curve(self, event: str, figure: str) -> Curve:
        """A curve; empty if the run has none."""
        return self.curves.get((event, figure), Curve())

    def options(self) -> dict[str, Any]:
        """The configuration flat: "optimizer.lr" -> 2e-4."""
        return dict(flat(self.config))


def read_run(path: str | Path) -> Run:
    """A run from its folder.

    Raises:
        UserError: there is no such folder, or no run is in it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"{path}: no such folder; give the `save_dir` of a run")
    metrics, config = folder / "metrics.jsonl", folder / "config.yaml"
    if not metrics.is_file() and not config.is_file():
        raise UserError(f"{path} is not a run: there is neither metrics.jsonl nor config.yaml in it")
    run = Run(folder.resolve().name or str(folder), folder)
    if metrics.is_file():
        _read_records(run, metrics)
    if config.is_file():
        run.config = load_yaml(config)
    run.starts = read_starts(folder / FILE_NAME)
    return run


def read_runs(paths: list[str]) -> list[Run]:
    """Several runs, each under a name of its own: the folder's, with as many of its parents as make them distinct."""
    runs = [read_run(path) for path in paths]
    parts = [run.folder.resolve().parts for run in runs]
    for run, own in zip(runs, parts, strict=True):
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in parts) > 1:
            length += 1
        run.name = "/".join(own[-length:]).replace("//", "/")
    return runs


def _read_records(run: Run, path: Path) -> None:
    """Line by line, so that a long run needs no more memory than its numbers."""
    with as_user_error(path, "cannot be read"):
        for line in read_lines(path, MAX_RECORD_BYTES):
            record = _record(line or b"")
            if record is None:
                run.broken_lines += line is None or bool(line.strip())
            else:
                _add(run, record)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or _number(record.get("num_updates")) is None:
        return None
    return record if record.get("event") in ("train", "valid") else None


def _add(run: Run, record: dict[str, Any]) -> None:
    event = str(record["event"])
    subset = record.get("subset", "valid")
    if event == "valid" and subset != "valid":
        event = f"valid {subset}"
    updates, seconds = _number(record["num_updates"]), _number(record.get("seconds"))
    assert updates is not None
    run.num_records += 1
    run.last[event] = record
    for name, value in record.items():
        number = math.nan if value is None else _number(value)
        if number is None or name in ("num_updates", "event", "subset"):
            continue
        curve = run.curves.setdefault((event, name), Curve())
        curve.updates.append(updates)
        curve.hours.append(math.nan if seconds is None else seconds / 3600)
        curve.values.append(number)


def _number(value: Any) -> float | None:
    """The value as a finite number, None if it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values of what is nested, as a.b.0."""
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list) and any(isinstance(value, dict) for value in tree):
        yield from flat(dict(enumerate(tree)), prefix)
    elif prefix:
        yield prefix, tree
