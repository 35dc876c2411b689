"""Loss scaling against fairseq's rule, written out slowly, and in a run."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ftk.config.options import mistakes
from ftk.optim.config import LossScaleConfig
from ftk.optim.loss_scaler import LossScaler
from tests.records import records_of
from tests.trainer.toy import ToyModel, assert_same, everything, toy_trainer

CPU = torch.device("cpu")


class SlowScaler:
    """The rule in Python numbers."""

    def __init__(self, config):
        self.config = config
        self.scale = config.fp16_init_scale
        self.calm = self.updates = self.overflows = self.at_floor = 0

    def update(self, overflow):
        self.updates += 1
        if overflow:
            self.calm = 0
            self.overflows += 1
            if self.overflows / self.updates >= self.config.fp16_scale_tolerance:
                self.at_floor += self.scale <= self.config.fp16_min_scale
                self.scale = max(self.config.fp16_min_scale, self.scale / 2)
                self.updates = self.overflows = 0
        else:
            self.calm += 1
            if self.calm == self.config.fp16_scale_window:
                self.scale = min(2.0**64, self.scale * 2)
                self.calm = self.updates = self.overflows = 0


@pytest.mark.parametrize("tolerance", [0.0, 0.25])
@pytest.mark.parametrize("window", [1, 5])
def test_the_scale_follows_the_rule(tolerance, window):
    config = LossScaleConfig(
        fp16_init_scale=16.0, fp16_scale_window=window, fp16_scale_tolerance=tolerance, fp16_min_scale=0.5
    )
    ours, slow = LossScaler(config, CPU), SlowScaler(config)
    draw = random.Random(3)
    seen = set()
    for _ in range(400):
        overflow = draw.random() < 0.3
        ours.update(torch.tensor(overflow))
        slow.update(overflow)
        assert ours.scale.item() == slow.scale
        assert ours.overflows_at_floor() == slow.at_floor
        seen.add(slow.scale)
    assert len(seen) > 3


def test_gradients_are_those_without_scaling():
    scaler = LossScaler(LossScaleConfig(fp16_init_scale=1024.0), CPU)
    layer = nn.Linear(4, 3)
    layer.bias.requires_grad_(False)
    scaler.scaled(layer(torch.ones(2, 4)).sum()).backward()
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 2048.0))
    scaler.unscale(layer.parameters())
    assert torch.equal(layer.weight.grad, torch.full((3, 4), 2.0))


def test_its_state_comes_back():
    config = LossScaleConfig(fp16_init_scale=8.0, fp16_scale_window=3)
    one, other = LossScaler(config, CPU), LossScaler(config, CPU)
    for overflow in (True, False, False):
        one.update(torch.tensor(overflow))
    other.load_state_dict(one.state_dict())
    for scaler in (one, other):
        scaler.update(torch.tensor(False))
    assert one.state_dict() == other.state_dict()
    assert one.scale.item() == 8.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fp16_init_scale": 0.0}, "fp16_init_scale is 0.0; it must be above 0"),
        ({"fp16_init_scale": 1.0, "fp16_min_scale": 2.0}, "fp16_min_scale is 2.0; it must not be above"),
        ({"fp16_scale_window": 0}, "fp16_scale_window is 0; it must be at least 1"),
        ({"fp16_scale_tolerance": 1.0}, "fp16_scale_tolerance is 1.0; it must be at least 0 and below 1"),
    ],
)
def test_options_out_of_range_are_named(options, message):
    assert message in mistakes(LossScaleConfig(**options))[0]


def test_an_overflow_skips_the_update_and_halves_the_scale(tmp_path):
    trainer = toy_trainer(
        tmp_path, training__precision="fp16", loss_scale__fp16_init_scale=2.0**100, training__max_update=4
    )
    before = everything(trainer)
    trainer.train()
    assert trainer.figures.skipped() == (4, 4)
    assert trainer.run.update.scaler.scale.item() == 2.0**96
    assert [record.get("loss_scale") for record in records_of(tmp_path / "run", "train")] == [2.0**98, 2.0**96]
    for name, tensor in before.items():
        assert torch.equal(tensor, everything(trainer)[name]), name


def test_a_run_in_fp16_stays_near_fp32(tmp_path):
    runs = {}
    for precision in ("fp32", "fp16"):
        torch.manual_seed(0)
        trainer = toy_trainer(
            tmp_path,
            model=ToyModel(0.0),
            save_dir=precision,
            training__precision=precision,
            training__max_update=30,
            loss_scale__fp16_init_scale=128.0,
        )
        runs[precision] = trainer.train().best.value
        assert trainer.figures.skipped() == (0, 0)
        assert {tensor.dtype for tensor in everything(trainer).values()} == {torch.float32}
    assert runs["fp16"] == pytest.approx(runs["fp32"], abs=0.02)


def test_a_resumed_fp16_run_ends_with_the_same_bits(tmp_path):
    options = {"training__precision": "fp16", "loss_scale__fp16_scale_window": 3, "lr_scheduler": "constant"}
    whole = toy_trainer(tmp_path, save_dir="whole", training__max_update=11, **options)
    whole.train()
    toy_trainer(tmp_path, training__max_update=5, **options).train()
    resumed = toy_trainer(tmp_path, training__max_update=11, **options)
    resumed.train()
    assert_same(resumed, whole)
    assert resumed.run.update.scaler.state_dict() == whole.run.update.scaler.state_dict()


def test_an_overflow_at_the_floor_ends_the_run(tmp_path):
    class Bad(ToyModel):
        def forward(self, tokens):
            return super().forward(tokens) * float("inf")

    options = {"fp16_init_scale": 1.0, "fp16_min_scale": 0.5}
    trainer = toy_trainer(
        tmp_path,
        model=Bad(),
        training__precision="fp16",
        **{f"loss_scale__{name}": value for name, value in options.items()},
    )
    with pytest.raises(FloatingPointError, match=r"the loss scale is at its floor of 0\.5"):
        trainer.train()
    # Its last state was saved. What made it overflow is gone: it goes on.
    mended = toy_trainer(
        tmp_path, training__precision="fp16", **{f"loss_scale__{name}": value for name, value in options.items()}
    )
    assert mended.state.num_updates > 0
    assert mended.train().reason == "max_update 10 is reached"
