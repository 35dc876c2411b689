"""One update: gradients of all micro-batches, divided once by their targets, clipped once, applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.criterions.base import Criterion
from ftk.model_parallel.gradients import GlobalGradients, finish_gradients, is_non_finite
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World
from ftk.optim.base import set_lr, step_unless
from ftk.optim.loss_scaler import LossScaler
from ftk.optim.parameter_groups import gradient_multipliers, multiply_gradients
from ftk.trainer.agreement import UpdateCounts
from ftk.trainer.log.metrics import Stopwatch
from ftk.trainer.runner import Runner, SequentialRunner
from ftk.trainer.seeding import seed_update
from ftk.trainer.train_config import TrainConfig


class Gradients(NamedTuple):
    """What going forward and backward through an update's micro-batches gives, besides the gradients."""

    sums: dict[str, tuple[Tensor, Tensor]]  # name -> (0-d sum, 0-d count) on the device, of this process's batches
    num_tokens: int  # of all processes, padding counted
    num_targets: float  # of all processes


class Update:
    """Takes the updates of a run. Nothing here waits for the device.

    Args:
        config: of the run.
        model: whose parameters are trained, on `device`.
        criterion: counts the targets; computes the loss, where there is no `runner`.
        optimizer: of the model's trainable parameters.
        device: where batches go.
        stopwatch: counts what the parts take.
        runner: takes micro-batches through the model; None: one after the other, by this process alone.
        world: the processes of the run; None: this one alone.
        multipliers: (factor, parameters whose gradients it multiplies); None: as the options say of this model.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        stopwatch: Stopwatch,
        *,
        runner: Runner | None = None,
        world: World | None = None,
        multipliers: Sequence[tuple[float, Sequence[nn.Parameter]]] | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.multipliers = gradient_multipliers(model, config.parameters) if multipliers is None else multipliers
        self.device = device
        self.stopwatch = stopwatch
        self.world = world or World.single(device)
        precision = config.training.precision
        self.runner = runner or SequentialRunner(StepModule(model, criterion), device, precision)
        self.gradients = GlobalGradients(model, self.parameters, self.world)
        self.scaler = LossScaler(config.loss_scale, device) if precision == "fp16" else None

    def count(self, micro_batches: list[Batch]) -> UpdateCounts:
        """Tokens and targets of this process's batches.

        Args:
            micro_batches: CPU batches as the collater made them.
        """
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        return UpdateCounts(num_tokens, sum(self.criterion.count(batch) for batch in micro_batches))

    def accumulate(self, micro_batches: list[Batch], num_updates: int, counts: UpdateCounts | None = None) -> Gradients:
        """Leave in the parameters the gradient of the mean loss over all targets of the update, of all processes.

        Args:
            micro_batches: this process's CPU batches as the collater made them.
            num_updates: updates done before; it seeds what is random in the model.
            counts: of all processes together; None: those of these batches.
        """
        counts = counts or self.count(micro_batches)
        seed_update(self.config.common.seed, num_updates, self.world.data_rank, self.world.pipeline_rank)
        self.optimizer.zero_grad(set_to_none=True)
        with self.stopwatch.part("forward_backward"):
            share = torch.full((), 1.0 / (counts.num_targets or 1), device=self.device)
            scale = share if self.scaler is None else self.scaler.scaled(share)
            sums = self.runner.forward_backward(micro_batches, scale)
            finish_gradients(self.model)
            if self.scaler is not None:
                self.scaler.unscale(self.parameters)
            multiply_gradients(self.multipliers)
        return Gradients(sums, counts.num_tokens, counts.num_targets)

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
            norm = self.gradients.norm()  # on the host, and so all that the optimizer takes, if gradients are offloaded
            # Of several processes each knows its own loss alone; one that is bad has made the norm bad (`guarded`).
            seen = [norm] if self.world.size > 1 else [gradients.sums["loss"][0].to(norm.device), norm]
            skip = is_non_finite(*seen)
            self.gradients.clip(clip_norm, norm)
            set_lr(self.optimizer, lr, own_lrs)
            step_unless(self.optimizer, skip)
            if self.scaler is not None:
                self.scaler.update(skip)
        norm, skip = (value.to(self.device, non_blocking=True) for value in (norm, skip))
        one = torch.ones_like(norm)
        gradients.sums["gnorm"] = (norm, one)
        if clip_norm:
            gradients.sums["clip_share"] = (norm > clip_norm, one)
        return skip
