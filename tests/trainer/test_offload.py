"""Gradients on the host, losses on a device: an update, its figures and its hooks mix no tensors of both.

The meta device stands in for a GPU: an operation on tensors of it and of the host is refused just so.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ftk.model_parallel.world import Sizes, World
from ftk.trainer.log.metrics import Meters, Stopwatch, TrainingFigures
from ftk.trainer.watch.nonfinite import SkippedUpdates
from tests.trainer.toy import toy_trainer

DEVICE = torch.device("meta")


def on_device(value):
    return torch.tensor(value, device=DEVICE)


def test_the_stand_in_refuses_to_be_mixed():
    with pytest.raises(RuntimeError):
        torch.stack([torch.tensor(1.0), on_device(1.0)])


@pytest.mark.parametrize(("gradient", "taken"), [(0.5, True), (float("nan"), False)])
def test_an_update_of_gradients_on_the_host(tmp_path, gradient, taken):
    trainer = toy_trainer(tmp_path, training__clip_norm=0.7)
    update = trainer.run.update
    update.device = DEVICE
    update.world = World(0, Sizes(shard=2), DEVICE)
    for parameter in update.parameters:
        parameter.grad = torch.full_like(parameter, gradient)
    before = [parameter.detach().clone() for parameter in update.parameters]
    sums = {"loss": (on_device(1.0), on_device(1))}
    skip = update.apply(sums, 0.1)
    unchanged = [torch.equal(old, new) for old, new in zip(before, update.parameters, strict=True)]
    assert not any(unchanged) if taken else all(unchanged)
    assert skip.device == DEVICE
    assert sums.keys() == {"loss", "gnorm", "clip_share"}
    assert all(value.device == DEVICE for pair in sums.values() for value in pair)

    figures = TrainingFigures(update.world, Stopwatch())
    figures.add(sums, skip=skip, num_tokens=8, num_targets=8)
    step = SimpleNamespace(device=DEVICE, num_updates=1, epoch=1, sums=sums, skip=skip)
    SkippedUpdates().after_step(step)


def test_figures_that_lie_on_the_host_are_added_on_the_device():
    meters = Meters(DEVICE)
    for _ in range(2):
        meters.add(
            {"loss": (on_device(1.0), on_device(1)), "gnorm": (torch.tensor(2.0), torch.tensor(1))},
            unless=on_device(False),
        )
    assert all(total.device == DEVICE for total in meters._totals.values())
