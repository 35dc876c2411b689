"""Tensors besides model and optimizer, first of all the moving average of the weights."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

import ftk
from ftk.checkpoint import (
    BrokenCheckpoint,
    extra_tensor_names,
    load_extra_tensors,
    load_model_state,
    load_model_tensors,
    read_trainer_state,
    save_checkpoint,
    verify,
)
from ftk.checkpoint.average import average_checkpoints, export_weights
from ftk.checkpoint.inspect import inspect_checkpoint, render
from ftk.errors import UserError
from tests.records import assert_same_tensors

from .conftest import Awkward
from .test_faults import flip, tensors_of


def averages(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    """A moving average as training keeps it: fp32, trained parameters by their first names."""
    return {name: torch.full_like(p, value, dtype=torch.float32) for name, p in model.named_parameters()}


def save(folder, seed=0, value=0.5, **options):
    model = Awkward(seed)
    state = {"num_updates": seed + 1, "tokenizer": "abc"}
    extra = {"ema": averages(model, value)}
    save_checkpoint(folder, model=model, trainer_state=state, config={"a": 1}, extra_tensors=extra, **options)
    return model


def test_extra_tensors_come_back_bit_for_bit(tmp_path) -> None:
    tensors = {
        "a/b": torch.randn(3, 4),
        "n": torch.tensor(7),
        "none": torch.zeros(0, 2),
        "h": torch.randn(5).bfloat16(),
    }
    save_checkpoint(
        tmp_path / "c",
        model={"w": torch.ones(2)},
        trainer_state={},
        config={},
        extra_tensors={"ema": tensors, "more": {}},
    )
    assert verify(tmp_path / "c") == []
    assert extra_tensor_names(tmp_path / "c") == ["ema", "more"]
    targets = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_extra_tensors(tmp_path / "c", "ema", targets)
    assert_same_tensors(targets, tensors)
    with pytest.raises(UserError, match="has no 'other' tensors"):
        load_extra_tensors(tmp_path / "c", "other", {})
    other = {"x": torch.zeros(1), "n": torch.tensor(0)}
    with pytest.raises(UserError, match=r"a/b is \[3, 4\] in the checkpoint, \[3, 5\] here"):
        load_extra_tensors(tmp_path / "c", "ema", {"a/b": torch.zeros(3, 5), **other})
    assert other["n"] == 0
    assert load_extra_tensors(tmp_path / "c", "ema", other) == ["x"]
    assert (other["n"], other["x"]) == (7, 0)


@pytest.mark.parametrize("name", ["model", "optimizer", "tokenizer", "../up", "a/b", ""])
def test_a_name_that_is_taken_or_no_folder_is_refused(tmp_path, name: str) -> None:
    with pytest.raises(ValueError, match="plain name"):
        save_checkpoint(tmp_path / "c", model={}, trainer_state={}, config={}, extra_tensors={name: {}})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["flip", "missing", "empty index"])
def test_a_damaged_average_is_found_before_any_weight_changes(tmp_path, damage: str) -> None:
    save(tmp_path / "c")
    if damage == "flip":
        flip(tensors_of(tmp_path / "c", "ema"), -5)
    elif damage == "missing":
        tensors_of(tmp_path / "c", "ema").unlink()
    else:
        (tmp_path / "c" / "ema" / "index.json").write_text("")
    assert verify(tmp_path / "c")
    model = Awkward(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(BrokenCheckpoint, match="ema/"):
        load_model_state(tmp_path / "c", model, ema=True)
    targets = averages(model, 3.0)
    with pytest.raises(BrokenCheckpoint, match="ema/"):
        load_extra_tensors(tmp_path / "c", "ema", targets)
    assert_same_tensors(model.state_dict(), before)
    assert all((tensor == 3.0).all() for tensor in targets.values())


def test_a_model_takes_the_average_only_where_it_is_asked_for(tmp_path) -> None:
    original = save(tmp_path / "c")
    plain, averaged = Awkward(seed=1), Awkward(seed=1)
    load_model_state(tmp_path / "c", plain)
    assert_same_tensors(plain.state_dict(), original.state_dict())
    load_model_state(tmp_path / "c", averaged, ema=True)
    for name, parameter in averaged.named_parameters():
        assert (parameter == 0.5).all(), name
        assert parameter.dtype == dict(original.named_parameters())[name].dtype
    assert torch.equal(averaged.counts, original.counts)  # buffers are no part of an average
    assert averaged.head.weight is averaged.embedding.weight
    assert_same_tensors(load_model_tensors(tmp_path / "c", ema=True), averaged.state_dict())


def test_without_an_average_it_is_refused(saved) -> None:
    model = Awkward(seed=1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for take in (lambda: load_model_state(saved, model, ema=True), lambda: load_model_tensors(saved, ema=True)):
        with pytest.raises(UserError, match="has no averaged weights .*without `ema`"):
            take()
    assert_same_tensors(model.state_dict(), before)


def test_the_average_is_shown(tmp_path, saved) -> None:
    save(tmp_path / "c")
    summary = inspect_checkpoint(tmp_path / "c")
    elements = sum(parameter.numel() for parameter in Awkward().parameters())
    assert summary.extra == {"ema": 4 * elements}
    assert "ema        moving average of the weights, taken with `ema` (" in render(summary)
    assert json.loads(json.dumps(dataclasses.asdict(summary)))["extra"] == summary.extra
    assert inspect_checkpoint(saved).extra == {}


def test_the_mean_of_averages_and_that_of_weights(tmp_path) -> None:
    for seed, value in ((0, 1.0), (1, 4.0)):
        save(tmp_path / str(seed), seed, value)
    average_checkpoints([tmp_path / "0", tmp_path / "1"], tmp_path / "mean", ema=True)
    tensors = load_model_tensors(tmp_path / "mean")
    assert (tensors["inner.weight"] == 2.5).all()
    assert extra_tensor_names(tmp_path / "mean") == []
    average_checkpoints([tmp_path / "0", tmp_path / "1"], tmp_path / "plain")
    expected = (Awkward(0).inner.weight + Awkward(1).inner.weight) / 2
    assert torch.allclose(load_model_tensors(tmp_path / "plain")["inner.weight"], expected)


@pytest.mark.parametrize("ema", [False, True])
def test_export_keeps_what_a_model_needs_and_no_more(tmp_path, tokenizer_folder, ema: bool) -> None:
    save(tmp_path / "c", tokenizer_folder=tokenizer_folder)
    export_weights(tmp_path / "c", tmp_path / "out", ema=ema)
    assert verify(tmp_path / "out") == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.yaml",
        "manifest.json",
        "model",
        "tokenizer",
        "trainer.json",
    ]
    assert_same_tensors(load_model_tensors(tmp_path / "out"), load_model_tensors(tmp_path / "c", ema=ema))
    assert read_trainer_state(tmp_path / "out")["exported_from"] == str(tmp_path / "c")
    with pytest.raises(UserError, match="`overwrite`"):
        export_weights(tmp_path / "c", tmp_path / "out")


def test_commands_take_the_average_with_ema(tmp_path, data_bin, command) -> None:
    """Training with --ema-decay; then validation, generation, export and the library, with --ema and without."""
    flags = ["--arch", "glm_tiny", "--num-layers", 2, "--seq-length", 48, "--batch-size", 2, "--device", "cpu"]
    run = tmp_path / "run"
    command(
        "ftk-train", data_bin, *flags, "--lr", "1e-2", "--max-update", 4, "--ema-decay", 0.9, "--save-dir", run, code=0
    )
    plain, averaged = ftk.load_model(run), ftk.load_model(run, ema=True)
    weights = [model.state_dict() for model in (plain, averaged)]
    assert any(not torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

    exported = command("ftk-checkpoint", "export", run, tmp_path / "exported", "--ema")
    assert exported.stdout == f"wrote {tmp_path / 'exported'}, the moving average of the weights of {run}\n"
    assert_same_tensors(ftk.load_model(tmp_path / "exported").state_dict(), weights[1])
    assert "ema        moving average" in command("ftk-checkpoint", "inspect", run).stdout

    def validate(path, *more):
        done = command(
            "ftk-validate", data_bin, "--path", path, "--max-samples", 4, "--output-format", "json", *more, code=0
        )
        return json.loads(done.stdout.splitlines()[-1])["loss"]

    assert validate(run, "--ema") == validate(tmp_path / "exported") != validate(run, "--no-ema")
    refused = command("ftk-generate", data_bin, "--path", tmp_path / "exported", "--max-samples", 1, "--ema", code=2)
    assert "has no averaged weights" in refused.stderr
    command("ftk-generate", data_bin, "--path", run, "--max-samples", 2, "--max-len", 4, "--ema", code=0)
