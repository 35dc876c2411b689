"""What runs have recorded, and whether their weights and what they compute are the same."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ftk.checkpoint import load_model_tensors
from ftk.trainer.log.records import Record, read_records


def records_of(run: Path, event: str | None = None) -> list[Record]:
    """All of a run's folder, or those of an event ("train", "valid")."""
    return [record for record in read_records(run / "metrics.jsonl") if event in (None, record["event"])]


def losses_of(run: Path, event: str = "train") -> list[float]:
    return [record["loss"] for record in records_of(run, event)]


def assert_same_tensors(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit, under the same names."""
    assert left.keys() == right.keys()
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].shape == right[name].shape, name
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (left[name], right[name])]
        assert torch.equal(*raw), name


def assert_same_weights(left: Path, right: Path) -> None:
    """Of two runs or checkpoints."""
    assert_same_tensors(load_model_tensors(left), load_model_tensors(right))


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    """To float32's last digits, where the numbers are small or the largest of them is."""
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, float(expected.abs().max()))
