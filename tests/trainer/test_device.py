"""How a batch gets to the device: by page-locked memory, the sample ids not at all."""

from __future__ import annotations

import torch
from torch import nn

from ftk.criterions.base import LossOutput
from ftk.model_parallel.step_module import StepModule
from ftk.trainer.device import to_device
from ftk.trainer.runner import SequentialRunner

BATCH = {"tokens": torch.arange(6), "loss_mask": torch.ones(6, dtype=torch.bool), "sample_ids": torch.arange(2), "n": 3}


def test_to_a_gpu_tensors_go_by_page_locked_memory_and_are_not_waited_for(monkeypatch):
    pinned, sent = [], []

    def pin_memory(tensor):
        pinned.append(tensor)
        return tensor.clone()

    def to(tensor, device, non_blocking=False):
        sent.append((tensor, str(device), non_blocking))
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    moved = to_device(BATCH, torch.device("cuda"))
    assert [id(tensor) for tensor in pinned] == [id(BATCH["tokens"]), id(BATCH["loss_mask"])]
    assert [id(tensor) for tensor, *_ in sent] == [id(moved["tokens"]), id(moved["loss_mask"])]
    assert [how for _, *how in sent] == [["cuda", True]] * 2
    assert moved["sample_ids"] is BATCH["sample_ids"]
    assert moved["n"] == 3


def test_on_the_cpu_nothing_is_copied():
    assert all(value is BATCH[name] for name, value in to_device(BATCH, torch.device("cpu")).items())


class Seen:
    """A task and a criterion that note what they are given."""

    def __init__(self):
        self.batches = []

    def train_step(self, model, criterion, batch):
        self.batches.append(batch)
        loss = model(batch["tokens"].float()).sum()
        return LossOutput(loss, torch.ones(()), {})

    valid_step = train_step


def test_wrappers_find_no_sample_ids_and_the_task_does():
    task, called = Seen(), []
    step = StepModule(nn.Linear(6, 1), task, None)

    class Wrapper(nn.Module):
        def forward(self, batch, training):
            called.append(batch)
            return step(batch, training)

    runner = SequentialRunner(Wrapper(), torch.device("cpu"), "fp32")
    runner.forward_backward([BATCH], torch.ones(()))
    runner.evaluate(BATCH)
    for batch, inner in zip(called, task.batches, strict=True):
        tensors = {name for name, value in batch.items() if isinstance(value, torch.Tensor)}
        assert tensors == {"tokens", "loss_mask"}
        assert all(inner[name] is BATCH[name] for name in BATCH)
    assert len(task.batches) == 2
