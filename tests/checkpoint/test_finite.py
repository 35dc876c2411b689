"""Weights that are not finite: found, and said by the commands that copy them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from ftk.checkpoint import load_model_tensors, read_config, save_checkpoint
from ftk.checkpoint.finite import non_finite
from ftk_cli.checkpoint import main

ORIGINAL = Path(__file__).parents[1] / "golden" / "glm_tiny" / "original_checkpoint"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_tensor_with_one_bad_element_is_named(dtype: torch.dtype, value: float) -> None:
    if dtype == torch.float8_e4m3fn:
        value = math.nan  # it has no infinity
    good = torch.ones(3, 5)
    bad = good.clone()
    bad[2, 4] = value
    tensors = {"a": good.to(dtype), "b": bad.to(dtype), "c": good.to(dtype)}
    assert non_finite(tensors) == ["b"]


def test_integers_empty_and_meta_tensors_are_finite() -> None:
    assert non_finite({"i": torch.arange(3), "e": torch.empty(0), "m": torch.empty(2, device="meta")}) == []
    assert non_finite({"s": torch.tensor(1e308, dtype=torch.float64)}) == []


@pytest.fixture
def diverged(tmp_path: Path, capfd) -> Path:
    """A GLM with one NaN in its weights."""
    assert main(["convert", "--from", "glm", str(ORIGINAL), str(tmp_path / "good"), "--num-attention-heads", "4"]) == 0
    tensors = load_model_tensors(tmp_path / "good")
    tensors["layers.1.attention.qkv.weight"][3, 4] = math.nan
    config = read_config(tmp_path / "good")
    return save_checkpoint(tmp_path / "bad", model=tensors, trainer_state={"num_updates": 5}, config=config)


@pytest.mark.parametrize(
    "command",
    [
        ["export", "bad", "out"],
        ["export", "bad", "out.safetensors", "--format", "safetensors"],
        ["export", "bad", "out.pt2", "--format", "export"],
        ["export", "bad", "out", "--quantize", "int8"],
        ["average", "--inputs", "good", "bad", "--output", "out"],
        ["convert", "bad", "out", "--to", "glm"],
    ],
    ids=lambda command: "-".join(command),
)
def test_nothing_is_made_of_weights_that_are_not_finite(diverged: Path, command, monkeypatch, capfd) -> None:
    monkeypatch.chdir(diverged.parent)
    capfd.readouterr()
    assert main(command) == 2
    said = capfd.readouterr().err
    assert "bad: holds NaN or infinity in layers.1.attention.qkv.weight; its training has diverged" in said
    assert sorted(path.name for path in diverged.parent.iterdir()) == ["bad", "good"]


def test_inspect_names_weights_that_are_not_finite(diverged: Path, capfd) -> None:
    capfd.readouterr()
    assert main(["inspect", str(diverged)]) == 1
    assert "PROBLEM  model: holds NaN or infinity in layers.1.attention.qkv.weight\n" in capfd.readouterr().out
    assert main(["inspect", str(diverged.with_name("good"))]) == 0
