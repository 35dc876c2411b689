"""The moving average of the weights in a run: validated, saved, continued."""

from __future__ import annotations

import pytest
import torch

from ftk.checkpoint.load import load_model_tensors
from tests.records import records_of
from tests.trainer.toy import assert_same, toy_trainer

EMA = {"ema__ema_decay": 0.9, "training__max_update": 12, "training__validate_interval_updates": 4}


def test_training_is_the_same_with_and_without_an_average(tmp_path):
    plain = toy_trainer(tmp_path, save_dir="plain", training__max_update=12, training__validate_interval_updates=4)
    averaged = toy_trainer(tmp_path, **EMA)
    plain.train()
    averaged.train()
    assert_same(plain, averaged)
    names = ("loss", "ppl", "num_targets")
    assert [[r[n] for n in names] for r in records_of(tmp_path / "plain", "valid")] == [
        [r[n] for n in names] for r in records_of(tmp_path / "run", "valid")
    ]


def test_the_average_is_that_of_the_weights_after_each_update(tmp_path):
    trainer = toy_trainer(tmp_path, **EMA)
    slow = {name: parameter.detach().double() for name, parameter in trainer.run.model.named_parameters()}
    step = trainer.train_step

    def watched(batches):
        step(batches)
        n = trainer.state.num_updates
        decay = min(0.9, (1 + n) / (10 + n))
        for name, parameter in trainer.run.model.named_parameters():
            slow[name] = decay * slow[name] + (1 - decay) * parameter.detach().double()

    trainer.train_step = watched
    trainer.train()
    saved = load_model_tensors(tmp_path / "run", ema=True)
    for name, expected in slow.items():
        torch.testing.assert_close(saved[name].double(), expected, rtol=1e-5, atol=1e-6)
        assert not torch.equal(saved[name], trainer.run.model.get_parameter(name))


def test_it_is_validated_and_can_rank(tmp_path):
    trainer = toy_trainer(tmp_path, checkpoint__best_metric="ema_loss", **EMA)
    best = trainer.train().best
    records = records_of(tmp_path / "run", "valid")
    assert len(records) == 3
    assert all(record["ema_loss"] != record["loss"] for record in records)
    assert (best.metric, best.value) == ("ema_loss", min(record["ema_loss"] for record in records))


def test_a_continued_run_has_the_same_average(tmp_path):
    options = {**EMA, "lr_scheduler": "constant"}
    whole = toy_trainer(tmp_path, save_dir="whole", **options)
    whole.train()
    toy_trainer(tmp_path, **{**options, "training__max_update": 5}).train()
    resumed = toy_trainer(tmp_path, **options)
    resumed.train()
    assert_same(resumed, whole)
    for name, average in whole.run.ema.state_dict().items():
        assert torch.equal(average, resumed.run.ema.state_dict()[name])
    assert [r["ema_loss"] for r in records_of(tmp_path / "run", "valid")][-2:] == pytest.approx(
        [r["ema_loss"] for r in records_of(tmp_path / "whole", "valid")][-2:], abs=0.0
    )


def test_other_parameters_may_be_frozen_when_a_run_goes_on(tmp_path, caplog):
    caplog.set_level("INFO")
    options = {**EMA, "checkpoint__reset_optimizer": True}
    first = toy_trainer(tmp_path, parameters__freeze=["output.bias"], **{**options, "training__max_update": 5})
    first.train()
    resumed = toy_trainer(tmp_path, parameters__freeze=["embedding"], **options)
    averages = resumed.run.ema.state_dict()
    assert "embedding.weight" not in averages
    assert torch.equal(averages["output.bias"], resumed.run.model.get_parameter("output.bias"))
    for name in averages.keys() - {"output.bias"}:
        assert torch.equal(averages[name], first.run.ema.state_dict()[name])
    assert "the moving average starts again for output.bias" in caplog.text
    resumed.train()
    assert load_model_tensors(tmp_path / "run", ema=True).keys() == dict(resumed.run.model.named_parameters()).keys()


def test_an_average_can_begin_in_the_middle_of_a_run(tmp_path):
    toy_trainer(tmp_path, training__max_update=5).train()
    resumed = toy_trainer(tmp_path, **EMA)
    for name, average in resumed.run.ema.state_dict().items():
        assert torch.equal(average, resumed.run.model.get_parameter(name))
    resumed.train()
    assert records_of(tmp_path / "run", "valid")[-1]["ema_loss"] > 0


def test_an_average_that_is_given_up_is_said(tmp_path, caplog):
    toy_trainer(tmp_path, **{**EMA, "training__max_update": 5}).train()
    toy_trainer(tmp_path, training__max_update=8)
    assert "has averaged weights; without `ema_decay` they are dropped" in caplog.text
