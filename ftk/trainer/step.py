"""One update: gradients of all micro-batches, divided once by their targets, clipped once, applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.model_parallel.gradient_sync import gradient_sync
from ftk.optim.base import set_lr, step_unless
from ftk.optim.clip import clip_gradients, gradient_norm, is_non_finite
from ftk.optim.loss_scaler import LossScaler
from ftk.optim.parameter_groups import gradient_multipliers, multiply_gradients
from ftk.tasks.base import Batch, Task
from ftk.trainer.device import autocast, count_tokens, to_device
from ftk.trainer.metrics import Stopwatch, Sums
from ftk.trainer.seeding import seed_update
from ftk.trainer.train_config import TrainConfig


class Gradients(NamedTuple):
    """What going forward and backward through an update's micro-batches gives, besides the gradients."""

    sums: dict[str, tuple[Tensor, Tensor]]  # name -> (0-d sum, 0-d count) on the device
    num_tokens: int  # padding counted
    num_targets: int


class Update:
    """Takes the updates of a run. Nothing here waits for the device.

    Args:
        config: of the run.
        task: takes the forward pass and counts the targets.
        model: as it is called, on `device`.
        criterion: what the task computes the loss with.
        optimizer: of the model's trainable parameters.
        device: where batches go.
        stopwatch: counts what the parts take.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        model: nn.Module,
        criterion: Any,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        stopwatch: Stopwatch,
    ) -> None:
        self.config = config
        self.task = task
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.multipliers = gradient_multipliers(model, config.parameters)
        self.device = device
        self.stopwatch = stopwatch
        fp16 = config.training.precision == "fp16"
        self.scaler = LossScaler(config.loss_scale, device) if fp16 else None

    def accumulate(self, micro_batches: list[Batch], num_updates: int) -> Gradients:
        """Leave in the parameters the gradient of the mean loss over all targets of the micro-batches.

        Args:
            micro_batches: CPU batches as the collater made them.
            num_updates: updates done before; it seeds what is random in the model.
        """
        num_targets = sum(self.task.count_targets(batch) for batch in micro_batches)
        seed_update(self.config.common.seed, num_updates)
        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, tuple[Tensor, Tensor]] = {}
        with self.stopwatch.part("forward_backward"):
            for place, batch in enumerate(micro_batches, start=1):
                with gradient_sync(self.model, enabled=place == len(micro_batches)):
                    with autocast(self.device, self.config.training.precision):
                        output = self.task.train_step(self.model, self.criterion, to_device(batch, self.device))
                    mean = output.loss / max(1, num_targets)
                    (mean if self.scaler is None else self.scaler.scaled(mean)).backward()
                _add(sums, {"loss": (output.loss.detach(), output.num_targets), **output.meters})
            if self.scaler is not None:
                self.scaler.unscale(self.parameters)
            multiply_gradients(self.multipliers)
        return Gradients(sums, sum(count_tokens(batch) for batch in micro_batches), num_targets)

    def apply(self, gradients: Gradients, lr: float, own_lrs: Mapping[str, float] | None = None) -> Tensor:
        """Take the optimizer's step, unless loss or gradient is infinite or not a number.

        A skipped update leaves parameters and optimizer as they were.

        Args:
            gradients: of `accumulate`; the norm and the share of clipped updates are added to its sums.
            lr: learning rate.
            own_lrs: the rates of groups that have a schedule of their own, by its name.

        Returns:
            Whether the update was skipped, 0-d bool.
        """
        clip_norm = self.config.training.clip_norm
        with self.stopwatch.part("optimizer"):
            norm = gradient_norm(self.parameters)
            skip = is_non_finite(gradients.sums["loss"][0], norm)
            clip_gradients(self.parameters, clip_norm, norm)
            set_lr(self.optimizer, lr, own_lrs)
            step_unless(self.optimizer, skip)
            if self.scaler is not None:
                self.scaler.update(skip)
        one = torch.ones_like(norm)
        gradients.sums["gnorm"] = (norm, one)
        if clip_norm:
            gradients.sums["clip_share"] = (norm > clip_norm, one)
        return skip


def _add(sums: dict[str, tuple[Tensor, Tensor]], more: Sums) -> None:
    """Add name by name."""
    for name, (total, count) in more.items():
        old = sums.get(name)
        sums[name] = (total, count) if old is None else (old[0] + total, old[1] + count)
