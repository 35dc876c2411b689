"""Every figure of a run's records against one computed by hand, with a clock that moves only when it is told to."""

from __future__ import annotations

import json
import logging
import math

import pytest
import torch

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.trainer import Trainer, build_run
from ftk.trainer.hooks import Hook
from ftk.trainer.log import run_report
from ftk.trainer.watch import throughput
from ftk.trainer.watch.throughput import batch_flops
from tests.records import records_of
from tests.trainer.toy import ToyModel, ToyTask, collate, toy_config, toy_trainer


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class CountedModel(ToyModel):
    """Pretends to a simple count: 5 a token, 3 a target, 2 a pair."""

    def training_flops(self, num_tokens, num_targets, num_pairs):
        return 5 * num_tokens + 3 * num_targets + 2 * num_pairs


class TimedTask(ToyTask):
    """Every batch takes 0.5 s to come."""

    def __init__(self, tmp_path, clock):
        super().__init__(tmp_path, num_samples=32)
        self.clock = clock

    def collater(self):
        def timed(samples):
            self.clock.now += 0.5
            return collate(samples)

        return timed

    def hooks(self):
        return [TimedHook(self.clock)]


class TimedHook(Hook):
    """0.25 s in no named part, 1 s of saving."""

    def __init__(self, clock):
        self.clock = clock

    def after_step(self, step):
        self.clock.now += 0.25

    def before_checkpoint(self, step):
        self.clock.now += 1.0


class TimedLoss(CrossEntropy):
    """Forward and backward take 2 s in training, and 1 s in validation. The loss is 3 a target."""

    def __init__(self, clock):
        super().__init__(CrossEntropyConfig())
        self.clock = clock
        self.shapes = []  # of training batches
        self.targets = []

    def __call__(self, model, batch):
        self.clock.now += 2.0 if model.training else 1.0
        if model.training:
            self.shapes.append(tuple(batch.inputs["tokens"].shape))
            self.targets.append(len(batch.targets))
        output = super().__call__(model, batch)
        loss = output.loss * 0.0 + 3.0 * output.num_targets
        return output._replace(loss=loss, meters={"loss_token": (0.5 * loss.detach(), output.num_targets)})


def test_every_figure_by_hand(tmp_path, monkeypatch):
    """Two updates of two batches, validation and a checkpoint, and the same again."""
    clock = Clock()
    criterion = TimedLoss(clock)
    monkeypatch.setattr(throughput, "peak_memory_bytes", lambda device: 123456789)
    config = toy_config(
        tmp_path / "run",
        training__max_update=4,
        training__update_freq=2,
        training__validate_interval_updates=2,
        checkpoint__save_interval_updates=2,
        logging__log_interval=2,
        report__peak_tflops="1e-9",
    )
    torch.manual_seed(0)
    Trainer(
        build_run(config, task=TimedTask(tmp_path, clock), model=CountedModel(), criterion=criterion, clock=clock)
    ).train()
    records = records_of(tmp_path / "run")
    train = [record for record in records if record["event"] == "train"]
    valid = [record for record in records if record["event"] == "valid"]
    assert [(record["event"], record["num_updates"]) for record in records] == [
        ("train", 2),
        ("valid", 2),
        ("train", 4),
        ("valid", 4),
    ]

    # 4 batches: 0.5 s to come and 2 s of work each; 0.25 s of the hook for each of 2 updates.
    training_time = 4 * 0.5 + 4 * 2.0 + 2 * 0.25
    # 3 batches (9 samples): 0.5 s to come and 1 s of work each.
    validation_time = 3 * 0.5 + 3 * 1.0
    for number, record in enumerate(train):
        shapes = criterion.shapes[4 * number : 4 * number + 4]
        tokens = sum(rows * length for rows, length in shapes)
        targets = sum(criterion.targets[4 * number : 4 * number + 4])
        flops = 5 * tokens + 3 * targets + 2 * sum(rows * length**2 for rows, length in shapes)
        wall = training_time + (validation_time + 1.0 if number else 0.0)
        expected = {
            "epoch": 1,
            "loss": 3.0,
            "ppl": math.exp(3.0),
            "loss_token": 1.5,
            "ppl_token": math.exp(1.5),
            "gnorm": 0.0,
            "clip_share": 0.0,
            "skipped_updates": 0,
            "tokens_per_second": tokens / training_time,
            "target_tokens_per_second": targets / training_time,
            "updates_per_second": 2 / training_time,
            "flops_per_second": flops / training_time,
            "mfu": flops / training_time / 1000.0,  # the peak is given as 10^-9 TFLOP/s
            "peak_memory_bytes": 123456789,
            "data_share": 2.0 / wall,
            "forward_backward_share": 8.0 / wall,
            "optimizer_share": 0.0,
            "wait_share": 0.0,
            "log_share": 0.0,
            "validation_share": validation_time / wall if number else 0.0,
            "checkpoint_share": 1.0 / wall if number else 0.0,
            "other_share": 0.5 / wall,
            "seconds": training_time + number * wall,
        }
        assert {name: record[name] for name in expected} == pytest.approx(expected)
    assert [record["seconds"] for record in valid] == [
        training_time + validation_time,
        2 * training_time + 2 * validation_time + 1.0,
    ]
    assert [record["ppl_token"] for record in valid] == [pytest.approx(math.exp(1.5))] * 2


def test_a_model_that_does_not_count_has_no_flops(tmp_path):
    toy_trainer(tmp_path, report__peak_tflops="1").train()
    train = records_of(tmp_path / "run", "train")
    assert train
    for record in train:
        assert "flops_per_second" not in record
        assert "mfu" not in record
        assert record["peak_memory_bytes"] > 2**20


def test_without_a_known_peak_there_are_flops_and_no_mfu(tmp_path):
    toy_trainer(tmp_path, model=CountedModel()).train()
    record, *_ = records_of(tmp_path / "run")
    assert record["flops_per_second"] > 0
    assert "mfu" not in record


def test_the_peak_is_said_at_the_start(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        toy_trainer(tmp_path, model=CountedModel(), report__peak_tflops="0.5", training__max_update=1).train()
    assert "MFU is the share of 0.5 TFLOP/s (as given by `peak_tflops`)" in caplog.messages


def test_operations_of_a_batch():
    batch = collate([{"tokens": torch.arange(4).numpy()}, {"tokens": torch.arange(7).numpy()}])
    # 2 rows of 7 tokens with padding, 3 + 6 targets, 2 x 7 x 7 pairs
    assert batch_flops(CountedModel(), batch) == 5 * 14 + 3 * 9 + 2 * 98


def test_a_run_writes_its_report_and_its_starts(tmp_path):
    toy_trainer(tmp_path, report__report=True, training__max_update=6).train()
    toy_trainer(tmp_path, report__report=True, training__max_update=10).train()
    starts = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert [start["num_updates"] for start in starts] == [0, 6]
    assert [start["end"]["reason"] for start in starts] == ["max_update 6 is reached", "max_update 10 is reached"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "max_update 10 is reached" in page
    assert "restarted after update 6" in page


def test_the_report_follows_each_validation(tmp_path):
    pages = []

    class Looks(Hook):
        def after_step(self, step):
            pages.append((step.folder / "report.html").exists())

    task = ToyTask(tmp_path)
    task.hooks = lambda: [Looks()]
    toy_trainer(tmp_path, task=task, report__report=True, training__validate_interval_updates=4).train()
    assert pages == [False] * 4 + [True] * 6


def test_the_report_takes_two_percent_of_the_time_at_most(tmp_path, monkeypatch):
    """Updates of 10 s, a validation after each, and a report that takes 1 s: one in 5 or more updates."""
    clock, written = Clock(), []
    config = toy_config(
        tmp_path / "run", report__report=True, training__max_update=20, training__validate_interval_updates=1
    )

    def html(runs, source):
        clock.now += 1.0
        written.append(runs[0].last["valid"]["num_updates"])
        return ""

    class Slow(CrossEntropy):
        def __call__(self, model, batch):
            clock.now += 10.0 if model.training else 0.0
            return super().__call__(model, batch)

    monkeypatch.setattr(run_report, "report_html", html)
    Trainer(
        build_run(config, task=ToyTask(tmp_path), model=ToyModel(), criterion=Slow(CrossEntropyConfig()), clock=clock)
    ).train()
    assert written == [1, 6, 11, 16, 20]


def test_a_failure_is_told_in_the_starts(tmp_path):
    class Fails(CrossEntropy):
        def __call__(self, model, batch):
            raise RuntimeError("a worker died")

    with pytest.raises(RuntimeError):
        toy_trainer(tmp_path, criterion=Fails(CrossEntropyConfig())).train()
    (start,) = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert start["end"]["reason"] == "failed: RuntimeError: a worker died"
