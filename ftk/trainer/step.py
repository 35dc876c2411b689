"""One update: gradients of all micro-batches, divided once by their targets, clipped once, applied."""

from __future__ import annotations

import contextlib
import logging
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.criterions.base import Criterion, LossOutput
from ftk.errors import UserError
from ftk.model_parallel.compile import is_compiled, run_uncompiled
from ftk.model_parallel.gradients import GlobalGradients, clip_factor, gradient_sync, guarded, is_non_finite
from ftk.model_parallel.shards import multiply_gradients
from ftk.model_parallel.step_module import StepModule, add_sums, autocast
from ftk.model_parallel.world import World
from ftk.optim.base import set_lr, step_unless, takes_scale
from ftk.optim.loss_scaler import LossScaler
from ftk.trainer.config import TrainConfig
from ftk.trainer.log.metrics import Stopwatch, Sums
from ftk.trainer.signals import STOP_SIGNALS, StopSignals

logger = logging.getLogger(__name__)


class UpdateCounts(NamedTuple):
    """Sizes of an update."""

    num_tokens: int  # padding counted
    num_targets: float  # or the sum of their weights


class Update:
    """Takes the updates of a run. Nothing here waits for the device.

        counts = update.count(micro_batches)  # of several ranks: summed over all
        with update.gradients(num_updates, counts) as scale:
            sums = update.runner.forward_backward(micro_batches, scale)
        skip = update.apply(sums, lr)

    Args:
        model: whose parameters are trained.
        criterion: counts the targets.
        optimizer: of the model's trainable parameters.
        runner: runs forward and backward passes.
        world: the ranks of the run.
        multipliers: (factor, parameters whose gradients it multiplies).

    Attributes:
        is_cold: whether `warm_up` is to be called before the first update.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: nn.Module,
        criterion: Criterion,
        optimizer: torch.optim.Optimizer,
        stopwatch: Stopwatch,
        runner: Runner,
        world: World,
        multipliers: Sequence[tuple[float, Sequence[nn.Parameter]]] = (),
    ) -> None:
        self.config = config
        self.model = model
        self.criterion = criterion
        self.optimizer = optimizer
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.multipliers = multipliers
        self.stopwatch = stopwatch
        self.runner = runner
        self.world = world
        self.device = world.device
        self.global_gradients = GlobalGradients(model, self.parameters, self.world, self.runner.uncounted)
        self.scaler = LossScaler(config.loss_scale, self.device) if config.training.precision == "fp16" else None
        self.is_cold = is_compiled(model)

    def warm_up(self, micro_batches: list[Batch]) -> None:
        """Compile what is to be compiled, by a forward and a backward pass whose gradients are dropped, so that the
        first update takes as long as others. All ranks call it, once.

        Where `compile` auto has chosen what torch fails to compile, the model runs uncompiled on all ranks. Stages of a
        pipeline wait for each other within the passes: there a failure ends the run.

        Args:
            micro_batches: of an update, on the CPU.
        """
        self.is_cold, began = False, time.perf_counter()
        may_fail = self.config.engine.compile == "auto" and self.world.sizes.pipeline == 1
        failure = None
        try:
            self.runner.forward_backward(micro_batches, torch.ones((), device=self.device))
        except Exception as error:
            if not may_fail or not _is_of_compiler(error):
                raise
            failure = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        failures = [found for found in self.world.gather_json(failure) if found] if may_fail else []
        if failures:
            run_uncompiled(self.model)
            logger.warning(
                "torch cannot compile the blocks of this model, which run uncompiled: %s (`compile` none leaves "
                "out the attempt)", failures[0],
            )  # fmt: skip
        else:
            logger.info("compiled in %.0f s", time.perf_counter() - began)
        self.optimizer.zero_grad(set_to_none=True)

    def count(self, micro_batches: list[Batch]) -> UpdateCounts:
        """Tokens and targets of this rank's batches.

        Args:
            micro_batches: CPU batches as the collater made them.
        """
        num_tokens = sum(batch.num_tokens for batch in micro_batches)
        return UpdateCounts(num_tokens, sum(self.criterion.count(batch) for batch in micro_batches))

    @contextlib.contextmanager
    def gradients(self, num_updates: int, counts: UpdateCounts) -> Iterator[Tensor]:
        """Surrounds the backward passes of an update; on exit the parameters hold the gradient of its mean loss.

        Args:
            num_updates: updates done before; seeds the random numbers of the model.
            counts: summed over all ranks.

        Yields:
            The factor of each summed loss in the backward pass, 0-d on the device.
        """
        seed_update(self.config.common.seed, num_updates, self.world.data_rank, self.world.pipeline_rank)
        self.optimizer.zero_grad(set_to_none=True)
        with self.stopwatch.part("forward_backward"):
            share = torch.full((), 1.0 / (counts.num_targets or 1), device=self.device)
            yield share if self.scaler is None else self.scaler.scaled(share)
            if self.scaler is not None:
                self.scaler.unscale(self.parameters)
            for factor, parameters in self.multipliers:
                multiply_gradients(parameters, factor)

    def apply(self, sums: Sums, lr: float) -> Tensor:
        """Take the optimizer's step, unless loss or gradient is infinite or not a number.

        A skipped update leaves parameters and optimizer as they were.

        Args:
            sums: from `runner.forward_backward`; the norm of the gradients and the share of clipped updates are added.

        Returns:
            Whether the update was skipped, 0-d bool.
        """
        clip_norm = self.config.training.clip_norm
        with self.stopwatch.part("optimizer"):
            # On the host, like the inputs of the optimizer, if gradients are offloaded.
            norm = self.global_gradients.norm()
            # Each rank has only its own loss; a non-finite one has made the norm on all ranks non-finite (`guarded`).
            seen = [norm] if self.world.size > 1 else [sums["loss"][0].to(norm.device), norm]
            skip = is_non_finite(*seen)
            set_lr(self.optimizer, lr)
            if clip_norm and norm.device.type != "cpu" and takes_scale(self.optimizer):
                # A pass over the gradients less. On a CPU it would change the last bit.
                step_unless(self.optimizer, skip, clip_factor(clip_norm, norm).reciprocal())
            else:
                self.global_gradients.clip(clip_norm, norm)
                step_unless(self.optimizer, skip)
            if self.scaler is not None:
                self.scaler.update(skip)
        norm, skip = (value.to(self.device, non_blocking=True) for value in (norm, skip))
        one = torch.ones_like(norm)
        sums["gnorm"] = (norm, one)
        if clip_norm:
            sums["clip_share"] = (norm > clip_norm, one)
        return skip


class Runner(Protocol):
    """Runs the forward and backward passes; the trainer divides, clips and steps.

    Attributes:
        stages: called for each micro-batch: the whole model with its loss, or this rank's stages of it.
        uncounted: names of this rank's parameters that another rank counts in norms and figures.
    """

    @property
    def stages(self) -> Sequence[StepModule]: ...

    @property
    def uncounted(self) -> Collection[str]: ...

    def forward_backward(self, micro_batches: Sequence[Batch], backward_scale: Tensor) -> Sums:
        """Add the gradient of the summed loss times a factor, summed over all ranks, to the parameters.

        Args:
            micro_batches: on the CPU, as the collater made them; the same number on every data rank.
            backward_scale: 0-d, on the device.

        Returns:
            "loss" and the criterion's meters, of this rank's batches; empty where no loss is computed.
        """

    def evaluate(self, batch: Batch) -> LossOutput | None:
        """The loss of a batch, in evaluation mode and without gradients; None where none is computed."""


class SequentialRunner:
    """Each micro-batch forward and backward, then the next.

    Args:
        module: a `StepModule`, perhaps wrapped.
        device: where batches go.
        precision: fp32, bf16 or fp16.
        many_ranks: whether there are other ranks, which must learn of a loss that is not finite.
        finishers: called after the last backward pass of an update, to complete the gradients.
        multiple, axes: of `Batch.longer`, which each micro-batch goes through.
    """

    uncounted: Collection[str] = ()

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        precision: str,
        *,
        many_ranks: bool = False,
        finishers: Sequence[Callable[[], None]] = (),
        multiple: int = 1,
        axes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.module = module
        self._finishers = finishers
        self._multiple, self._axes = multiple, axes
        self.device = device
        self.precision = precision
        self._scaled: Callable[[Tensor, Tensor], Tensor] = guarded if many_ranks else torch.mul

    @property
    def stages(self) -> Sequence[StepModule]:
        return [module for module in self.module.modules() if isinstance(module, StepModule)]

    def forward_backward(self, micro_batches: Sequence[Batch], backward_scale: Tensor) -> Sums:
        totals: Sums = {}
        for number, batch in enumerate(micro_batches, start=1):
            with gradient_sync(self.module, enabled=number == len(micro_batches)):
                try:
                    with autocast(self.device, self.precision):
                        output = self.module(batch.longer(self._multiple, self._axes).to(self.device))
                except (IndexError, RuntimeError) as error:
                    _refuse_unknown_target(batch, error)
                    raise
                self._scaled(output.loss, backward_scale).backward()
            add_sums(totals, {"loss": (output.loss.detach(), output.num_targets), **output.meters})
        for finish in self._finishers:
            finish()
        return totals

    def plain(self) -> SequentialRunner:
        """One that launches each kernel by itself."""
        return self

    def evaluate(self, batch: Batch) -> LossOutput:
        try:
            with autocast(self.device, self.precision):
                return self.module(batch.to(self.device))
        except (IndexError, RuntimeError) as error:
            _refuse_unknown_target(batch, error)
            raise


def _refuse_unknown_target(batch: Batch, error: Exception) -> None:
    """Raise a UserError with the sample if an error of torch is about a target that the scores do not have."""
    found = re.search(r"(?:Target|index) (-?\d+) is out of bounds(?: for dimension (\d+))?", str(error))
    if found is None or found[2] not in (None, "1") or batch.sample_ids is None:  # scores are [N, V]
        return
    wrong = (batch.targets == int(found[1])).nonzero().flatten().tolist()
    if not wrong:
        return
    samples, (num_rows, width) = batch.sample_ids, batch.placed_tokens.shape
    if len(samples) == num_rows and len(batch.places) == len(batch.targets):
        samples = samples[[int(batch.places[wrong[0]]) // width]]
    raise UserError(
        f"sample {' or '.join(map(str, samples))} has the target {found[1]}, for which the model has no score; "
        f"where loss_mask is true, a target is the number of one of the scores"
    ) from error


def unwrapped(runner: Runner) -> Runner:
    """The runner without DDP, so that gradients are this rank's, and without CUDA graphs, which call no hooks."""
    if not isinstance(runner, SequentialRunner):
        return runner
    if isinstance(runner.module, nn.parallel.DistributedDataParallel):
        return SequentialRunner(runner.module.module, runner.device, runner.precision)
    return runner.plain()


class Coordinator:
    """Decisions that all ranks of a run make at the same step: the counts of an update, and whether to stop.

    A signal reaches one rank, and clocks differ. So ranks exchange them by one sum of a few numbers on the host, before
    an update and between batches of a validation. A single process uses its own signal and clock at any time.

    Args:
        time_is_up: whether `stop_time_hours` are over by this process's clock; that of the main rank counts.
    """

    def __init__(self, world: World, signals: StopSignals, time_is_up: Callable[[], bool]) -> None:
        self.world = world
        self._signals = signals
        self._time_is_up = time_is_up
        self._signal: str | None = None  # known to all ranks
        self._hours_over = False  # known to all ranks

    @property
    def signal(self) -> str | None:
        """Name of the signal that ends the run, None if there is none."""
        return self._signals.received if self.world.mesh is None else self._signal

    @property
    def hours_over(self) -> bool:
        """Whether `stop_time_hours` are over."""
        return self._time_is_up() if self.world.mesh is None else self._hours_over

    def before_update(self, counts: UpdateCounts) -> UpdateCounts:
        """Sum the counts over all ranks, and exchange signals and clocks; all ranks call it."""
        if self.world.mesh is None:
            return counts
        tokens, targets = self._exchange(counts if self.world.counts_loss else UpdateCounts(0, 0))
        return UpdateCounts(int(tokens), targets)

    def should_stop(self) -> bool:
        """Whether any rank has received a signal; all ranks call it."""
        if self.world.mesh is not None:
            self._exchange(UpdateCounts(0, 0))
        return self.signal is not None

    def _exchange(self, counts: UpdateCounts) -> list[float]:
        received = [float(self._signals.received == name) for name in STOP_SIGNALS]
        hours = float(self.world.is_main and self._time_is_up())
        tokens, targets, *flags, over = self.world.sum_host([*counts, *received, hours])
        if self._signal is None:
            self._signal = next((name for name, flag in zip(STOP_SIGNALS, flags, strict=True) if flag), None)
        self._hours_over |= bool(over)
        return [tokens, targets]


def _is_of_compiler(error: Exception) -> bool:
    """Whether torch.compile has raised it, and not what was compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return isinstance(error, TorchDynamoException)


def seed_update(seed: int, num_updates: int, data_rank: int = 0, pipeline_rank: int = 0) -> None:
    """Seed torch (every device), NumPy and Python for the update that comes after `num_updates` updates.

    A resumed run draws the same numbers. Ranks with different batches or layers draw different numbers; tensor parallel
    ranks of the same layers draw the same.
    """
    mixed = mix(seed, num_updates)
    if data_rank or pipeline_rank:
        mixed = mix(mix(mixed, data_rank), pipeline_rank)
    torch.manual_seed(mixed)
    np.random.seed(mixed & 0xFFFFFFFF)
    random.seed(mixed)


def mix(seed: int, num_updates: int) -> int:
    """A 63-bit number: splitmix64's finaliser, twice, so that (1, 2) and (2, 1) give unrelated numbers."""
    return _finalise(_finalise(seed) + num_updates) >> 1


def _finalise(value: int) -> int:
    mask = (1 << 64) - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
    return value ^ (value >> 31)
