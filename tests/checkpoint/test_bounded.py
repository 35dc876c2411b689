"""A configuration that asks for more than the checkpoint holds takes no memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

import ftk
from ftk.checkpoint import BrokenCheckpoint, load_model_tensors
from ftk.checkpoint.bounded import bounded_by
from ftk_cli.checkpoint import main

from .conftest import forge_manifest

ORIGINAL = Path(__file__).parents[1] / "golden" / "glm_tiny" / "original_checkpoint"


@pytest.fixture
def converted(tmp_path: Path, capfd) -> Path:
    folder = tmp_path / "ours"
    assert main(["convert", "--from", "glm", str(ORIGINAL), str(folder), "--num-attention-heads", "4"]) == 0
    capfd.readouterr()
    return folder


def set_options(folder: Path, **options: object) -> None:
    path = folder / "config.yaml"
    config = yaml.safe_load(path.read_text())
    config["model"] |= options
    path.write_text(yaml.safe_dump(config))
    forge_manifest(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 10**4},
        {"vocab_size": 10**8},
        {"max_positions": 10**8},
        {"hidden_size": 10**6, "num_attention_heads": 1},
        {"ffn_hidden_size": 10**7},
    ],
    ids=str,
)
def test_model_larger_than_its_tensors_is_refused(converted: Path, options, capfd) -> None:
    set_options(converted, **options)
    with pytest.raises(BrokenCheckpoint, match="far larger than its tensors|cannot be built"):
        ftk.load_model(converted)
    out = str(converted.with_name("out.pt2"))
    assert main(["export", str(converted), out, "--format", "export"]) == 2
    assert main(["convert", "--to", "glm", str(converted), str(converted.with_name("theirs"))]) == 2
    assert main(["inspect", str(converted)]) == 0
    assert sorted(path.name for path in converted.parent.iterdir()) == ["ours"]


def test_a_model_of_any_kind_is_stopped_on_the_meta_device_too() -> None:
    stored = {"w": torch.ones(3)}
    with pytest.raises(BrokenCheckpoint, match="far larger"), bounded_by(stored, "here"), torch.device("meta"):
        nn.ModuleList(nn.Linear(2, 2) for _ in range(10**9))
    with pytest.raises(BrokenCheckpoint, match="far larger"), bounded_by(stored, "here"):
        nn.ModuleList(nn.Dropout() for _ in range(10**9))
    with pytest.raises(BrokenCheckpoint, match="far larger"), bounded_by(stored, "here"), torch.device("meta"):
        nn.Module().register_buffer("cache", torch.empty(2**40))
    with bounded_by(stored, "here"):
        nn.Linear(3, 3)
    nn.ModuleList(nn.Linear(2, 2) for _ in range(2000))  # and afterwards all may be built


def test_tied_and_packed_weights_are_within_the_bounds(tmp_path: Path, converted: Path, capfd) -> None:
    tensors = load_model_tensors(converted)
    with bounded_by(tensors, "here"):
        ftk.load_model(converted)
    for kind in ("int4", "int8"):
        assert main(["export", str(converted), str(tmp_path / kind), "--quantize", kind]) == 0
        ftk.load_model(tmp_path / kind)
