"""How the micro-batches of an update go through the model: here, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.criterions.base import LossOutput
from ftk.model_parallel.gradients import gradient_sync, guarded
from ftk.model_parallel.step_module import StepModule
from ftk.trainer.device import autocast
from ftk.trainer.log.metrics import Sums

Totals = dict[str, tuple[Tensor, Tensor]]  # name -> (0-d sum, 0-d count) on the device


class Runner(Protocol):
    """Goes forward and backward; the trainer divides, clips and steps.

    Attributes:
        stages: what is called for each micro-batch: the whole model with its loss, or this process's stages of it.
    """

    @property
    def stages(self) -> Sequence[StepModule]: ...

    def forward_backward(self, micro_batches: Sequence[Batch], backward_scale: Tensor) -> Totals:
        """Leave in the parameters the gradient of the summed loss times a factor, summed over the data ranks too.

        Args:
            micro_batches: on the CPU, as the collater made them; as many on every data rank.
            backward_scale: 0-d, on the device.

        Returns:
            "loss" and the criterion's meters, of this process's batches; empty where no loss is computed.
        """

    def evaluate(self, batch: Batch) -> LossOutput | None:
        """The loss of a batch, in evaluation mode and without gradients; None where none is computed."""


class SequentialRunner:
    """Each micro-batch forward and backward, then the next.

    Args:
        module: a `StepModule`, perhaps wrapped.
        device: where batches go.
        precision: fp32, bf16 or fp16.
        several: whether there are other processes, which have to hear of a loss that is not finite.
    """

    def __init__(self, module: nn.Module, device: torch.device, precision: str, *, several: bool = False) -> None:
        self.module = module
        self.device = device
        self.precision = precision
        self._scaled: Callable[[Tensor, Tensor], Tensor] = guarded if several else torch.mul

    @property
    def stages(self) -> Sequence[StepModule]:
        return [module for module in self.module.modules() if isinstance(module, StepModule)]

    def forward_backward(self, micro_batches: Sequence[Batch], backward_scale: Tensor) -> Totals:
        totals: Totals = {}
        for place, batch in enumerate(micro_batches, start=1):
            with gradient_sync(self.module, enabled=place == len(micro_batches)):
                with autocast(self.device, self.precision):
                    output = self.module(batch.to(self.device))
                self._scaled(output.loss, backward_scale).backward()
            add_sums(totals, {"loss": (output.loss.detach(), output.num_targets), **output.meters})
        return totals

    def evaluate(self, batch: Batch) -> LossOutput:
        with autocast(self.device, self.precision):
            return self.module(batch.to(self.device))


def without_copies(runner: Runner) -> Runner:
    """The same, but where there are copies of the model (DDP) they are told nothing: gradients are of this one."""
    if isinstance(runner, SequentialRunner) and isinstance(runner.module, nn.parallel.DistributedDataParallel):
        return SequentialRunner(runner.module.module, runner.device, runner.precision)
    return runner


def add_sums(totals: Totals, more: Sums) -> None:
    """Add name by name, in place."""
    for name, (total, count) in more.items():
        old = totals.get(name)
        totals[name] = (total, count) if old is None else (old[0] + total, old[1] + count)
