"""Whatever is damaged in a run's newest checkpoint: it is found before a weight is used, and the one before serves."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ftk.checkpoint import verify
from tests.checkpoint.conftest import forge_manifest
from tests.checkpoint.test_faults import flip
from tests.trainer.test_resume import OPTIONS, figures
from tests.trainer.toy import ToyDataset, ToyTask, assert_same, toy_trainer

SAVING = {**OPTIONS, "checkpoint__save_interval_updates": 1, "checkpoint__keep_last": 0, "ema__ema_decay": 0.9}
FILES = [
    "config.yaml",
    "trainer.json",
    "manifest.json",
    "model/index.json",
    "model/tensors_00000_of_00001.safetensors",
    "optimizer/index.json",
    "optimizer/tensors_00000_of_00001.safetensors",
    "ema/index.json",
    "ema/tensors_00000_of_00001.safetensors",
    "tokenizer/vocabulary.txt",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run with all of its checkpoints."""
    trainer = toy_trainer(tmp_path_factory.mktemp("whole"), **SAVING)
    assert trainer.train().exit_code == 0
    return trainer


def swap(left: Path, right: Path) -> None:
    content = left.read_bytes()
    left.write_bytes(right.read_bytes())
    right.write_bytes(content)


DAMAGES = {
    "a byte is flipped at the start": lambda path: flip(path, 0),
    "a byte is flipped in the middle": lambda path: flip(path, path.stat().st_size // 2),
    "a byte is flipped at the end": lambda path: flip(path, -1),
    "it is cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "it is cut to half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "it is empty": lambda path: os.truncate(path, 0),
    "it is all zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "it is removed": lambda path: path.unlink(),
    "it has a byte more": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
}


def copy_of(whole, tmp_path):
    shutil.copytree(whole.run.checkpoints.folder, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / ".lock").unlink(missing_ok=True)
    return tmp_path / "run" / "checkpoint_17"


def assert_goes_on_from_the_one_before(tmp_path, whole, caplog):
    assert verify(tmp_path / "run" / "checkpoint_17")
    resumed = toy_trainer(tmp_path, **SAVING)
    assert resumed.state.num_updates == 16
    assert "checkpoint_last is incomplete or damaged" in caplog.text
    assert "checkpoint_17: is incomplete or damaged: " in caplog.text
    assert f"continuing from {tmp_path / 'run' / 'checkpoint_16'}, the newest whole checkpoint" in caplog.text
    return resumed


@pytest.mark.parametrize(("file", "damage"), list(zip(FILES, itertools.cycle(DAMAGES))))
def test_damage_to_any_part_is_found_and_the_checkpoint_before_is_taken(tmp_path, whole, caplog, file, damage):
    DAMAGES[damage](copy_of(whole, tmp_path) / file)
    resumed = assert_goes_on_from_the_one_before(tmp_path, whole, caplog)
    resumed.run.checkpoints.release()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("model/tensors_00000_of_00001.safetensors", "ema/tensors_00000_of_00001.safetensors"),
        ("model/tensors_00000_of_00001.safetensors", "../checkpoint_3/model/tensors_00000_of_00001.safetensors"),
        ("model/index.json", "optimizer/index.json"),
        ("trainer.json", "../checkpoint_5/trainer.json"),
        ("manifest.json", "../checkpoint_5/manifest.json"),
    ],
)
def test_files_that_changed_places_are_found_and_the_run_ends_as_it_would_have(tmp_path, whole, caplog, left, right):
    folder = copy_of(whole, tmp_path)
    swap(folder / left, folder / right)
    resumed = assert_goes_on_from_the_one_before(tmp_path, whole, caplog)
    resumed.train()
    assert_same(resumed, whole)
    assert figures(tmp_path / "run") == figures(whole.run.checkpoints.folder)
    assert verify(tmp_path / "run" / "checkpoint_17") == []


STRANGE_STATES = {
    "best has an odd key": lambda state: state["best"].update(odd=1),
    "best lacks its value": lambda state: state["best"].pop("value"),
    "best is no number": lambda state: state["best"].update(value="low"),
    "the iterator has no epoch": lambda state: state["iterator"].pop("epoch"),
    "the iterator is in epoch 0": lambda state: state["iterator"].update(epoch=0),
    "samples beyond 64 bits": lambda state: state["iterator"].update(samples_consumed=1 << 70),
    "an ordering without a window": lambda state: state["iterator"].update(ordering={"batch_size": 1}),
    "figures without meters": lambda state: state["figures"].pop("meters"),
    "a meter of one number": lambda state: state["figures"].update(meters={"loss": [1.0]}),
    "skipped updates beyond 64 bits": lambda state: state["figures"].update(skipped=[1 << 64, 0]),
    "scores are texts": lambda state: state["scores"].update(checkpoint_1="good"),
    "drops of the schedule are a mapping": lambda state: state["lr_scheduler"].update(drops={}),
    "a loss scale beyond float32": lambda state: state.update(loss_scale={"scale": 1e300, "counts": [0] * 4}),
    "counts of the loss scale are missing": lambda state: state.update(loss_scale={"scale": 2.0}),
    "no number of updates": lambda state: state.pop("num_updates"),
    "the number of updates is null": lambda state: state.update(num_updates=None),
    "a field is missing": lambda state: state.pop("figures"),
    "the data processes are none": lambda state: state.update(data_processes=0),
}


@pytest.mark.parametrize("change", STRANGE_STATES.values(), ids=[name.replace(" ", "-") for name in STRANGE_STATES])
def test_a_state_that_no_run_has_is_found_though_its_manifest_fits_it(tmp_path, whole, caplog, change):
    folder = copy_of(whole, tmp_path)
    state = json.loads((folder / "trainer.json").read_text())
    change(state)
    (folder / "trainer.json").write_text(json.dumps(state))
    forge_manifest(folder)
    resumed = toy_trainer(tmp_path, **SAVING)
    assert resumed.state.num_updates == 16
    assert "checkpoint_17: is incomplete or damaged: trainer.json" in caplog.text
    resumed.run.checkpoints.release()


# -- data workers -------------------------------------------------------------------------------------------------


class DyingDataset(ToyDataset):
    """One sample of the second epoch kills whoever makes it, or fails."""

    def __init__(self, num_samples, seed, how):
        super().__init__(num_samples, seed)
        self.how = how

    def sample(self, epoch, index):
        if (epoch, index) == (2, 7):
            if self.how == "raises":
                raise ZeroDivisionError("a bug")
            os.kill(os.getpid(), self.how)
        return super().sample(epoch, index)


@pytest.mark.parametrize("how", [9, 11, "raises"])
def test_a_worker_that_dies_is_reported_and_the_state_is_saved(tmp_path, caplog, monkeypatch, how):
    # PyTorch looks every five seconds
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))
    task = ToyTask(tmp_path)
    healthy = task.load_split
    task.load_split = lambda split: DyingDataset(24, 5, how) if split == "train" else healthy(split)
    options = {**OPTIONS, "dataloader__num_workers": 2}
    trainer = toy_trainer(tmp_path, task=task, **options)
    others = {*multiprocessing.active_children()}
    with pytest.raises((RuntimeError, ZeroDivisionError)):
        trainer.train()
    assert {*multiprocessing.active_children()} == others
    assert ("sample 7 of epoch 2" in caplog.text) == (how == "raises")
    assert trainer.run.checkpoints.last_saved == trainer.state.num_updates >= 4
    assert verify(tmp_path / "run" / "checkpoint_last") == []
    resumed = toy_trainer(tmp_path, **OPTIONS)
    assert resumed.state.num_updates == trainer.state.num_updates
    for name, tensor in trainer.run.model.state_dict().items():
        assert torch.equal(tensor, resumed.run.model.state_dict()[name])
    resumed.run.checkpoints.release()
