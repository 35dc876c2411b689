"""The learning rate range test: its rates, when it stops, what it concludes, and that it leaves the run alone."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex

import pytest
import torch

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.trainer import Trainer, build_run
from ftk.trainer.watch.config import LRRangeConfig
from ftk.trainer.watch.lr_range import LRRange, Sweep, describe_range, lr_range_test, range_config, write_range
from tests.trainer.toy import Scripted, ToyModel, ToyTask, assert_same, toy_config, toy_trainer


def range_trainer(tmp_path, criterion=None, num_samples=24, **options):
    config = dataclasses.replace(toy_config(tmp_path / "run"), lr_range=LRRangeConfig(lr_range_test=True, **options))
    torch.manual_seed(0)
    task = ToyTask(tmp_path, num_samples)
    return Trainer(
        build_run(
            range_config(config), task=task, model=ToyModel(), criterion=criterion or CrossEntropy(CrossEntropyConfig())
        )
    )


def test_the_rate_rises_by_the_same_factor_from_update_to_update():
    sweep = Sweep(LRRangeConfig(lr_range_start=1e-4, lr_range_end=1.0, lr_range_updates=11), first=50)
    assert [sweep.lr(50 + n) for n in range(11)] == pytest.approx([10 ** (-4 + 0.4 * n) for n in range(11)])


def test_the_updates_are_ordinary_ones_at_the_rising_rate(tmp_path):
    found = lr_range_test(trainer := range_trainer(tmp_path, lr_range_updates=12, lr_range_end=1e-2))
    assert found.rates == pytest.approx([1e-7 * 1e5 ** (n / 11) for n in range(12)])
    slow = toy_trainer(tmp_path, save_dir="slow")
    losses = []
    for n in range(12):  # six updates an epoch
        if n % 6 == 0:
            batches = list(slow.run.train_iterator.batches())
        slow.run.schedule.lr = lambda num_updates: found.rates[num_updates]
        slow.train_step([batches[n % 6]])
        losses.append(slow.figures.record()["loss"])
    assert found.losses == losses
    assert_same(trainer, slow)


@pytest.mark.parametrize(
    ("losses", "taken"),
    [
        ([3.0] * 10 + [2.0, 2.0, math.nan], 12),
        ([3.0] * 10 + [1.0, math.inf], 11),
        ([3.0] * 10 + [1.0, 2.0, 3.0, 4.1] + [5.0] * 9, 14),  # four times the lowest
        ([3.0, 3.1, 3.2, 4.0, 4.6, 5.0] + [5.0] * 9, 5),  # one and a half times the first
    ],
)
def test_the_test_stops_when_the_loss_explodes(tmp_path, losses, taken):
    found = lr_range_test(range_trainer(tmp_path, Scripted(losses, training=True), lr_range_updates=20))
    assert found.diverged
    assert found.losses == pytest.approx(losses[:taken])
    assert len(found.rates) == taken


def test_a_loss_that_is_never_finite_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"the loss was not finite after 1 update; lower `lr_range_start`"):
        lr_range_test(range_trainer(tmp_path, Scripted([3.0, math.nan], training=True), lr_range_updates=20))


def test_an_empty_split_is_an_error(tmp_path):
    with pytest.raises(UserError, match="ToyDataset .* has no sample of train: its length is 0"):
        lr_range_test(range_trainer(tmp_path, num_samples=0))


def valley():
    """A fall from 8 to 4 that is steepest at 1e-3, and a rise after 1e-2."""
    rates = [10 ** (-6 + n / 20) for n in range(101)]
    losses = [6 - 2 * math.tanh(2 * (math.log10(rate) + 3)) + 3 * max(0.0, math.log10(rate) + 2) ** 2 for rate in rates]
    return LRRange(rates, losses, diverged=False)


def test_the_suggestion_is_the_smaller_of_steepest_and_a_tenth_of_the_lowest(tmp_path):
    found = valley()
    lowest = min(range(101), key=lambda place: found.losses[place])
    assert found.suggestion == pytest.approx(min(1e-3, found.rates[lowest] / 10), rel=0.3)
    assert "diverged" not in [*describe_range(found)][-1]  # its last rates are too large, as one sees
    lines = list(describe_range(LRRange(found.rates[:81], found.losses[:81], diverged=False)))
    assert len(lines) == 1 + 20 + 3
    assert f"`lr` {found.suggestion:.1e}" in lines[-2]
    assert "is below 1.5 times the lowest" in lines[-1]
    values = json.loads(write_range(found, tmp_path).read_text())
    assert (values["lr"], values["loss"], values["suggestion"]) == (found.rates, found.losses, found.suggestion)


@pytest.mark.parametrize(
    "losses", [[5.0] * 30, [5.0 + n / 10 for n in range(30)], [5.0 - 0.001 * n for n in range(30)]]
)
def test_without_a_fall_there_is_no_suggestion(losses):
    found = LRRange([1e-6 * 1.5**n for n in range(30)], losses, diverged=False)
    assert found.suggestion is None
    assert "no rate can be suggested" in list(describe_range(found))[-1]


def test_a_run_in_the_folder_is_left_alone(tmp_path):
    toy_trainer(tmp_path).train()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    trainer = range_trainer(tmp_path, lr_range_updates=10)
    assert trainer.state.num_updates == 0
    write_range(lr_range_test(trainer), trainer.run.checkpoints.folder)
    after = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    new = {str(path.relative_to(tmp_path / "run")) for path in after.keys() - before.keys()}
    assert {path: after[path] for path in before} == before
    assert new == {f"lr_range/{name}" for name in ("config.yaml", "lr_range.json", ".lock")}


def test_nothing_of_it_goes_to_the_runs_sinks(tmp_path):
    sinks = {"tensorboard_dir": str(tmp_path / "tb"), "wandb_project": "p", "report": True}
    config = toy_config(tmp_path / "run", **{f"report__{name}": value for name, value in sinks.items()})
    config = dataclasses.replace(config, lr_range=LRRangeConfig(lr_range_test=True, lr_range_updates=10))
    criterion = CrossEntropy(CrossEntropyConfig())
    lr_range_test(
        Trainer(build_run(range_config(config), task=ToyTask(tmp_path), model=ToyModel(), criterion=criterion))
    )
    assert not (tmp_path / "tb").exists()
    assert {path.name for path in (tmp_path / "run" / "lr_range").iterdir()} == {"config.yaml", ".lock"}


def test_the_command_needs_no_length_and_prints_a_suggestion(command, data_bin, tmp_path):
    options = shlex.split("--arch glm_tiny --seq-length 64 --batch-size 2 --device cpu --save-dir")
    options.append(str(tmp_path / "r"))
    test = shlex.split("--lr-range-test --lr-range-updates 30")
    done = command("ftk-train", data_bin, *options, *test, "--lr-range-start", 1e-5, code=0)
    assert "suggestion     --lr " in done.stdout
    assert str(tmp_path / "r" / "lr_range" / "lr_range.json") in done.stdout
    dry = command("ftk-train", data_bin, *options, *test, "--dry-run")
    assert "updates in total     30" in dry.stdout, dry.stderr
    refused = command("ftk-train", data_bin, *options)
    assert "give --max-update or --max-epoch" in refused.stderr
