"""Updates whose passes are recorded and replayed are those of a run that launches each kernel by itself."""

from __future__ import annotations

import dataclasses
import logging
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import Sizes, World
from ftk.trainer import recorded
from ftk.trainer import run as runs
from ftk.trainer.step import SequentialRunner
from tests.dense import batch_of
from tests.generation.replay import Recording
from tests.trainer.toy import ToyModel, everything, toy_config, toy_trainer


@pytest.fixture
def recording(monkeypatch):
    """Passes are recorded here as on a GPU, after one of their size."""
    made = Recording()
    monkeypatch.setattr(recorded, "PASSES_BEFORE", 1)
    monkeypatch.setattr(runs, "recorder_of_passes", lambda config, world: made)
    return made


def trained(tmp_path, name, model=ToyModel, criterion=None, **options):
    torch.manual_seed(0)
    options = {"training__max_update": 12, "training__clip_norm": 0.7, "dataloader__batch_size": 5, **options}
    trainer = toy_trainer(tmp_path, save_dir=name, model=model(), criterion=criterion, **options)
    trainer.train()
    return everything(trainer)


def assert_near(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("update_freq", [1, 2, 3])
def test_updates_are_those_of_single_launches(tmp_path, recording, update_freq, dropout):
    options = {"training__update_freq": update_freq, "training__max_update": 20}
    expected = trained(tmp_path, "plain", partial(ToyModel, dropout=dropout), **options)
    assert recording.num_recorded == 0, "recorded though it was not asked for"
    found = trained(tmp_path, "recorded", partial(ToyModel, dropout=dropout), engine__cuda_graphs=True, **options)
    # The first micro-batch of an update, and those that add to it; their sizes; a text of another length.
    assert recording.num_replays > recording.num_recorded > min(update_freq, 2)
    assert_near(found, expected)


def test_a_criterion_with_meters(tmp_path, recording):
    smoothed = CrossEntropy(CrossEntropyConfig(label_smoothing=0.1))
    expected = trained(tmp_path, "plain", criterion=smoothed)
    assert_near(trained(tmp_path, "recorded", criterion=smoothed, engine__cuda_graphs=True), expected)
    assert recording.num_replays > 0


class Asks(nn.Module):
    def forward(self, hidden):
        assert bool(hidden.sum() > -1e9)  # the host waits for the device
        return hidden


def test_passes_that_cannot_be_recorded_are_taken_as_they_are(tmp_path, recording, caplog):
    def asking():
        model = ToyModel(dropout=0.0)
        model.embedding = nn.Sequential(model.embedding, Asks())
        return model

    expected = trained(tmp_path, "plain", asking)
    with caplog.at_level(logging.WARNING, "ftk.trainer.recorded"):
        found = trained(tmp_path, "recorded", asking, engine__cuda_graphs=True)
    assert caplog.text.count("cannot be recorded as a CUDA graph") == 1
    assert_near(found, expected)


class SomeUse(ToyModel):
    """A part of it is for texts of one length alone."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.more = nn.Linear(11, 11)

    def forward(self, tokens):
        scores = super().forward(tokens)
        return scores + self.more(scores) if tokens.size(1) == 5 else scores


@pytest.mark.parametrize("lengths", [[4, 5], [5, 4], [4], [4, 4]], ids=str)
def test_parts_that_some_batches_use_have_their_gradients(monkeypatch, lengths):
    monkeypatch.setattr(recorded, "PASSES_BEFORE", 1)
    torch.manual_seed(0)
    step, record = StepModule(SomeUse(), CrossEntropy(CrossEntropyConfig())), Recording()
    runners = [
        recorded.RecordedRunner(record, step, torch.device("cpu"), "fp32", weighs=True),
        SequentialRunner(step, torch.device("cpu"), "fp32"),
    ]
    for update in range(8):
        batches = []
        for length in [5] if update == 6 else lengths:  # at last, too, another than the first graph knows
            tokens = torch.randint(0, 11, (3, length))
            batches.append(batch_of({"tokens": tokens, "targets": tokens, "loss_mask": tokens > 2}))
        found = []
        for runner in runners:
            step.zero_grad()
            runner.forward_backward(batches, torch.ones(()))
            found.append([None if one.grad is None else one.grad.clone() for one in step.parameters()])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)
    assert record.num_replays > 0


@pytest.mark.parametrize("change", ["frozen", "tied"])
def test_frozen_and_tied_parameters(tmp_path, recording, change):
    def model():
        made = ToyModel(dropout=0.0)
        if change == "frozen":
            made.embedding.weight.requires_grad_(False)
        else:
            made.twin = made.embedding
        return made

    expected = trained(tmp_path, "plain", model)
    assert_near(trained(tmp_path, "recorded", model, engine__cuda_graphs=True), expected)
    assert recording.num_replays > 0


class LeavesWeightsOut(CrossEntropy):
    def loss(self, head, hidden, batch):
        return super().loss(head, hidden, dataclasses.replace(batch, weights=None))


def test_no_target_is_added_for_a_criterion_that_does_not_say_that_it_weighs(tmp_path, recording):
    criterion = LeavesWeightsOut(CrossEntropyConfig())
    assert (CrossEntropy.weighs, criterion.weighs) == (True, False)
    expected = trained(tmp_path, "plain", criterion=criterion)
    assert_near(trained(tmp_path, "recorded", criterion=criterion, engine__cuda_graphs=True), expected)


@pytest.mark.parametrize("name", ["weights", "groups"])
def test_added_targets_change_no_loss(name):
    torch.manual_seed(1)
    tokens = torch.arange(10).view(2, 5)
    batch = batch_of({"tokens": tokens, "targets": tokens, "loss_mask": tokens % 3 == 1})
    if name == "weights":
        batch.weights = torch.rand(len(batch.targets))
    longer = recorded.with_targets(batch, recorded.num_targets(len(batch.targets)))
    assert len(longer.targets) == 64
    model, criterion = ToyModel(dropout=0.0).eval(), CrossEntropy(CrossEntropyConfig(label_smoothing=0.1))
    found, expected = (criterion(model, one) for one in (longer, batch))
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-6)
    assert found.num_targets.item() == pytest.approx(expected.num_targets.item())
    assert criterion.count(longer) == pytest.approx(criterion.count(batch))


def test_sizes_of_targets_are_few_and_waste_little():
    sizes = [recorded.num_targets(count) for count in range(10_000)]
    assert all(count <= size <= max(64, 1.125 * count + 64) for count, size in enumerate(sizes))
    assert len(set(sizes)) < 90


def test_several_processes_and_looking_at_modules_are_refused(tmp_path):
    with pytest.raises(UserError, match="inspect_interval"):
        toy_trainer(tmp_path, engine__cuda_graphs=True, debug__inspect_interval=1)
    config = toy_config(tmp_path, engine__cuda_graphs=True)
    assert runs.recorder_of_passes(config, World.single(torch.device("cpu"))) is None
    with pytest.raises(UserError, match="`cuda_graphs` is for runs of one process .* not for 2 processes"):
        runs.recorder_of_passes(config, SimpleNamespace(size=2))
    with pytest.raises(UserError, match="not for 2 processes"):  # stages of a pipeline, before they are built
        runs.distribute(config, ToyModel(), None, SimpleNamespace(size=2, sizes=Sizes(pipeline=2)))
    config.parallel.cpu_offload = True
    with pytest.raises(UserError, match="not for `cpu_offload`"):
        runs.recorder_of_passes(config, World.single(torch.device("cpu")))
