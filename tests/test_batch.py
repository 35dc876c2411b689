"""A batch is moved, loses its loss and gets longer as a whole; wrappers hand it on as it is."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from ftk.batch import Batch, Group
from ftk.criterions.base import LossOutput
from ftk.model_parallel.step_module import StepModule
from ftk.trainer.step import SequentialRunner
from tests.dense import same_batches, tensors_of


def batch_of_all() -> Batch:
    """Two rows of three tokens, three targets, and something in every field."""
    return Batch(
        inputs={
            "tokens": torch.arange(6).view(2, 3),
            "lengths": torch.tensor([3, 2]),
            "longest": 3,
            "scale": 0.5,
            "widest": np.int64(2),
        },
        targets=torch.tensor([7, 8, 9]),
        places=torch.tensor([1, 2, 4]),
        sample_ids=np.array([5, 3]),
        weights=torch.tensor([0.5, 1.0, 1.0]),
        groups={"kind": Group(("a", "b"), torch.tensor([0, 0, 1]))},
        extras={"label": torch.tensor([1, 0])},
    )


def test_map_reaches_every_tensor_but_the_sample_ids():
    batch = batch_of_all()
    there = batch.map(torch.Tensor.numpy)
    back = there.map(torch.from_numpy)
    assert isinstance(there.inputs["tokens"], np.ndarray)
    assert len(tensors_of(batch)) == 7
    assert same_batches(batch, back)
    assert [back.inputs[name] for name in ("longest", "scale", "widest")] == [3, 0.5, 2]
    assert back.sample_ids is batch.sample_ids


def test_to_a_gpu_tensors_go_by_page_locked_memory_and_are_not_waited_for(monkeypatch):
    pinned, sent = [], []

    def pin_memory(tensor):
        pinned.append(tensor)
        return tensor.clone()

    def to(tensor, device, non_blocking=False):
        sent.append((str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    batch = batch_of_all()
    moved = batch.to(torch.device("cuda"))
    assert [id(tensor) for tensor in pinned] == [id(tensor) for tensor in tensors_of(batch)]
    assert sent == [("cuda", True)] * 7
    assert moved.sample_ids is batch.sample_ids


def test_on_the_cpu_nothing_is_copied():
    batch = batch_of_all()
    moved = batch.to(torch.device("cpu"))
    assert [id(tensor) for tensor in tensors_of(moved)] == [id(tensor) for tensor in tensors_of(batch)]


def test_without_loss_the_inputs_stay_and_all_else_is_empty():
    batch = batch_of_all()
    empty = batch.without_loss()
    assert empty.inputs is batch.inputs
    assert empty.sample_ids is batch.sample_ids
    scored = (empty.targets, empty.places, empty.weights, empty.groups["kind"].index, empty.extras["label"])
    assert [len(value) for value in scored] == [0] * 5
    assert [value.dtype for value in scored[:3]] == [torch.int64, torch.int64, torch.float32]


def test_longer_pads_the_axis_of_the_tokens_and_moves_the_places():
    batch = batch_of_all()
    batch.inputs["pairs"] = torch.ones(2, 3, 4)
    longer = batch.longer(4, {"tokens": "B T", "lengths": "B", "pairs": "B T 4"})
    assert longer.inputs["tokens"].tolist() == [[0, 1, 2, 0], [3, 4, 5, 0]]
    assert longer.inputs["pairs"].shape == (2, 4, 4)
    assert longer.inputs["pairs"][:, 3].eq(0).all()
    assert longer.inputs["lengths"] is batch.inputs["lengths"]
    assert longer.places.tolist() == [1, 2, 5]
    assert longer.targets is batch.targets
    assert batch.longer(3, {"tokens": "B T"}) is batch


def test_longer_stops_at_the_most_and_gives_lengths_to_a_model_that_reads_them():
    batch = batch_of_all()
    axes = {"tokens": "B T", "lengths": "B"}
    del batch.inputs["lengths"]
    assert batch.longer(8, axes, most=3) is batch
    longer = batch.longer(8, axes, most=6)
    assert longer.inputs["tokens"].shape == (2, 6)
    assert longer.inputs["lengths"].tolist() == [3, 3]
    assert "lengths" not in batch.longer(8, {"tokens": "B T"}).inputs


def test_longer_pads_a_source_behind_its_lengths():
    batch = batch_of_all()
    batch.inputs = {"tokens": torch.ones(2, 5, dtype=torch.int64), "decoder_tokens": batch.inputs["tokens"]}
    longer = batch.longer(4, {"tokens": "B S", "lengths": "B", "decoder_tokens": "B T"})
    assert longer.inputs["tokens"].tolist() == [[1, 1, 1, 1, 1, 0, 0, 0]] * 2
    assert longer.inputs["decoder_tokens"].shape == (2, 4)
    assert longer.inputs["lengths"].tolist() == [5, 5]
    assert longer.places.tolist() == [1, 2, 5]


class Seen:
    """A criterion that notes what it is given."""

    def __init__(self):
        self.batches = []

    def __call__(self, model, batch):
        self.batches.append(batch)
        return LossOutput(model(batch.inputs["tokens"].float()).sum(), torch.ones(()), {})


def test_wrappers_hand_the_batch_on_as_it_is():
    criterion, called = Seen(), []
    step = StepModule(nn.Linear(3, 1), criterion)

    class Wrapper(nn.Module):
        def forward(self, batch):
            called.append(batch)
            return step(batch)

    runner = SequentialRunner(Wrapper(), torch.device("cpu"), "fp32")
    batch = batch_of_all()
    runner.forward_backward([batch], torch.ones(()))
    runner.evaluate(batch)
    assert [id(one) for one in called] == [id(one) for one in criterion.batches]
    assert all(one.sample_ids is batch.sample_ids for one in called)
    assert len(called) == 2
