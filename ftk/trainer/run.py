"""The parts of a training run as one value, built from a configuration and loaded from a checkpoint if there is one."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ftk.checkpoint import extra_tensor_names, load_extra_tensors, numbered_checkpoints, read_config, resolve_model
from ftk.checkpoint.adapter import AdapterFiles
from ftk.checkpoint.head import head_section
from ftk.checkpoint.quantize import prepare_for
from ftk.criterions.base import Criterion
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.indexed.folder_layout import NoSplit
from ftk.errors import UserError, counted
from ftk.model_parallel.blocks import has_two_stacks
from ftk.model_parallel.data_parallel import uses_fsdp
from ftk.model_parallel.engine import prepare_process
from ftk.model_parallel.parallelize import parallelize_training
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World, resolve_device
from ftk.modules.cuda_graphs import CudaGraphs, Recorder
from ftk.modules.quantized_linear import Rounded
from ftk.optim.ema import EMA
from ftk.optim.parameter_groups import parameter_rules
from ftk.optim.schedules import LRScheduler
from ftk.registry import is_plugin
from ftk.tasks.base import Task
from ftk.tasks.contract import check_criterion, check_parts, complete_model_config
from ftk.tasks.restore import build_corpus, set_prompt_tokens
from ftk.trainer import dataloading
from ftk.trainer.adapters import adapt_and_freeze, quantization_of_base
from ftk.trainer.checkpoints import Checkpoints
from ftk.trainer.config import TrainConfig, describe_sources
from ftk.trainer.hooks import Hook, Hooks, build_hooks
from ftk.trainer.log.metrics import Stopwatch, Sums
from ftk.trainer.log.run_report import report_hooks
from ftk.trainer.recorded import RecordedRunner
from ftk.trainer.reference import load_reference, with_reference
from ftk.trainer.resume import data_identity, describe_stretch, with_recipe_of_run
from ftk.trainer.run_checks import (
    CheckStates,
    check_best_metric,
    log_busy_machine,
    warn_of_other_model,
    warn_of_short_updates,
)
from ftk.trainer.state import TrainerState
from ftk.trainer.step import Runner, SequentialRunner, Update
from ftk.trainer.teacher import with_teacher, with_teacher_checkpoint
from ftk.trainer.watch.anomaly import DetectAnomaly
from ftk.trainer.watch.model_inspection import Inspection
from ftk.trainer.watch.nonfinite import SkippedUpdates
from ftk.trainer.watch.profile import Profile

logger = logging.getLogger(__name__)


@dataclass
class Run:
    """The parts of a run, for a `Trainer`.

    Attributes:
        model: this rank's part of it, with the parameter names of the whole model.
        update: takes updates; `update.runner` runs forward and backward passes.
        ema: the moving average of the weights, None if there is none.
        train_iterator: batches of this rank.
        valid_iterators: by split.
        updates_per_epoch: in successive epochs, as a cycle.
        total_updates: length of the run, None without a limit.
        num_trained: trained parameters of the whole model.
        num_parameters: all of them, rounded ones too.
        hooks: of ftk, the task and the user.
    """

    config: TrainConfig
    task: Task
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    update: Update
    ema: EMA | None
    train_iterator: EpochBatchIterator
    valid_iterators: dict[str, EpochBatchIterator]
    updates_per_epoch: list[int]
    total_updates: int | None
    num_trained: int
    num_parameters: int
    checkpoints: Checkpoints
    state: TrainerState
    hooks: Hooks
    stopwatch: Stopwatch
    world: World

    @property
    def device(self) -> torch.device:
        return self.world.device

    def end_data_workers(self) -> None:
        """See `EpochBatchIterator.close`."""
        for iterator in (self.train_iterator, *self.valid_iterators.values()):
            iterator.close()

    def _trained(self) -> str:
        """How many parameters are trained, of how many if not all are."""
        if self.num_trained == self.num_parameters:
            return f"{self.num_trained:,} parameters"
        percent = 100 * self.num_trained / self.num_parameters
        share = f"{percent:.{2 if percent < 10 else 3}g} %"
        return f"{self.num_trained:,} of {self.num_parameters:,} parameters ({share})"

    def describe(self) -> None:
        """Log the first lines."""
        num_updates, total = self.state.num_updates, self.total_updates
        if num_updates > 0:
            logger.info("continuing after %s, in epoch %d", counted(num_updates, "update"), self.train_iterator.epoch)
        length = f"up to {counted(total, 'update')}" if total else "no limit of updates"
        precision = self.config.compute_type
        if total is not None and num_updates >= total:
            logger.info("this run has had all its updates; a larger `max_update` or `max_epoch` continues it")
        else:
            logger.info("training %s on %s in %s", self._trained(), self.device, precision)
        for line in describe_sources(self.config):
            logger.info("%s", line)
        if self.world.mesh is not None:
            logger.info("%s", self.world.sizes.describe(self.config.parallel))
        *others, last = self.updates_per_epoch  # of each shard
        per_epoch = ", ".join([*map(str, others), counted(last, "update")])
        logger.info("%s an epoch, %s; run folder %s", per_epoch, length, self.checkpoints.folder)
        warn_of_short_updates(self)
        warmup = getattr(self.schedule, "warmup_updates", 0)
        if total is not None and warmup > total:
            run = counted(total, "update")
            logger.warning("the warm-up (%s) is longer than the run (%s)", counted(warmup, "update"), run)
        if self.device.type == "cpu":
            log_busy_machine()
        if precision == "fp16" and self.device.type == "cpu":
            logger.warning("fp16 is slow on a CPU, several times slower than fp32; `precision` bf16 is faster")
        if "loss" in self.update.criterion.nats:
            logger.info(
                "losses are in nats (natural logarithm) per target token; ppl is exp(loss), exp(nll_loss) if smoothed"
            )


def build_task(config: TrainConfig) -> tuple[TrainConfig, Task]:
    """The task of a configuration, and the configuration with the options of model and task that the task determines.

    If a run is continued, its options replace those of the architecture's recipe.
    """
    config = with_recipe_of_run(config)
    check_criterion(config.task, config.criterion)
    corpus = build_corpus(config.dataset, _folder_of_model(config))
    task = config.task.build(corpus=corpus, seed=config.common.seed)
    model = dataclasses.replace(config.model, config=complete_model_config(task, config.model))
    task.for_model(model.config)
    set_prompt_tokens(task, config.adapter, model.config)
    chosen = dataclasses.replace(config.task, config=getattr(task, "config", config.task.config))
    config = dataclasses.replace(config, model=model, task=chosen)
    return with_reference(with_teacher_checkpoint(config, task), task), task


def _folder_of_model(config: TrainConfig) -> Path | None:
    """What a run starts from, or else has saved; None: it starts with initial weights."""
    checkpoint = config.checkpoint
    if checkpoint.finetune_from is not None and Path(checkpoint.finetune_from).exists():
        return resolve_model(checkpoint.finetune_from)
    return resolve_model(checkpoint.save_dir) if numbered_checkpoints(Path(checkpoint.save_dir)) else None


def build_run(
    config: TrainConfig,
    *,
    task: Task | None = None,
    model: nn.Module | None = None,
    criterion: Criterion | None = None,
    world: World | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Build the parts of a configuration, for a new run or to continue the one in `save_dir`.

    Args:
        task: provides the samples, and has completed the model's configuration; None: as configured.
        model: on the CPU, with its initial weights; with several ranks it may be on the meta device. None: as
            configured.
        criterion: the loss; None: as configured.
        world: the ranks of the run, each of which calls this; None: this process alone.
        clock: monotonic, in seconds; for tests.

    Raises:
        UserError: parts do not fit each other, or a checkpoint does not fit the run.
    """
    world = world or World.single(resolve_device(config.common.device))
    if task is None:
        config, task = build_task(config)
    update_freq = config.training.update_freq
    share = {"rank": world.data_rank, "ranks": world.sizes.data}
    train_iterator = dataloading.train_iterator(config.dataloader, config.common, task, update_freq, **share)
    try:
        valid_iterators = dataloading.valid_iterators(config.dataloader, config.common, task, **share)
    except NoSplit as error:
        raise NoSplit(f"{error} (`valid_subset` none trains without validation)") from None
    updates_per_epoch = dataloading.updates_per_epoch(train_iterator, update_freq)
    total_updates = dataloading.total_updates(config.training, updates_per_epoch)

    stopwatch = Stopwatch(clock=clock)
    checkpoints = Checkpoints(config, task.tokenizer_folder, world=world)
    try:
        found = checkpoints.find()
        are_registered = model is None and criterion is None
        is_usual = model is None and not is_plugin(task.build_model)
        if model is None:
            prepare_process(config.engine)
            torch.manual_seed(config.common.seed)
            checkpoints.further_sections = quantization_of_base(config, found, world)
            model = build_model(config, task, world, checkpoints.further_sections)
        if not is_usual:
            warn_of_other_model(model, config, checkpoints.further_sections)
        adapter = adapt_and_freeze(model, config)
        checkpoints.adapter_files = None if adapter is None else AdapterFiles(adapter)
        checkpoints.further_sections |= head_section(model)
        criterion = config.criterion.build() if criterion is None else criterion
        if are_registered:
            check_parts(task, train_iterator.dataset, model, criterion, config.model)
        load_reference(criterion, config.criterion, world, config)
        criterion = with_teacher(criterion, config, world, task)
        options = config.optimizer.config
        if not hasattr(options, "lr"):
            raise UserError(f"optimizer {config.optimizer.name!r} must have an option `lr` for the schedule")
        # By name and of the whole model: a rank may not hold all parameters of a rule.
        rules = parameter_rules(model, getattr(options, "weight_decay", 0.0), config.parameters)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        num_parameters += sum(module.num_parameters for module in model.modules() if isinstance(module, Rounded))
        multiple, axes = config.dataloader.multiple_on(world.device.type), getattr(model, "INPUTS", {})
        if multiple > 1 and axes:
            for iterator in (train_iterator, *valid_iterators.values()):
                iterator.pad_batches(multiple, axes, getattr(model.config, "max_positions", None))
        num_tokens = _vocabulary_of(model, config.model.config)
        for iterator in (train_iterator, *valid_iterators.values()):
            iterator.limit_tokens(num_tokens)
        # Initial values are needed only if no checkpoint overwrites them.
        runner, model = distribute(config, model, criterion, world, fill=found is None)
        optimizer = config.optimizer.build(param_groups=rules.groups_of(model))
        multipliers = rules.multipliers_of(model)
        schedule = config.lr_scheduler.build(base_lr=options.lr, total_updates=total_updates)
        update = Update(config, model, criterion, optimizer, stopwatch, runner, world, multipliers)
        run = Run(
            config=config,
            task=task,
            model=model,
            optimizer=optimizer,
            schedule=schedule,
            update=update,
            ema=None,
            train_iterator=train_iterator,
            valid_iterators=valid_iterators,
            updates_per_epoch=updates_per_epoch,
            total_updates=total_updates,
            num_trained=rules.num_elements,
            num_parameters=num_parameters,
            checkpoints=checkpoints,
            state=TrainerState(),
            hooks=_hooks(config, task, update, schedule, [*valid_iterators]),
            stopwatch=stopwatch,
            world=world,
        )
        _load(run, found)
    except BaseException:
        checkpoints.release()
        raise
    checkpoints.prepare_folder()
    stopwatch.start(run.state.seconds)
    return run


# -- parts ------------------------------------------------------------------------------------------------------


def build_model(
    config: TrainConfig, task: Task, world: World, sections: Mapping[str, Any] = MappingProxyType({})
) -> nn.Module:
    """The whole model with its initial values; on the meta device if this rank will not hold all of it on its device.

    A model without `initial_value`, which draws values by name, is always built with its values.

    Args:
        sections: from `quantization_of_base`.
    """
    on_meta = bool(sections) or uses_fsdp(world, config.parallel) or world.sizes.replicate < world.size
    with torch.device("meta") if on_meta else nullcontext():
        model = task.build_model(config.model)
        prepare_for(sections, model)
    if on_meta and not hasattr(model, "initial_value"):
        model = task.build_model(config.model)
        prepare_for(sections, model)
    return model


def _vocabulary_of(model: nn.Module, options: Any) -> int | None:
    """How many tokens a whole model reads, with its adapter's prompt tokens; None where that is not known."""
    table = getattr(model, "token_embedding", None)
    if isinstance(table, nn.Embedding):
        return table.num_embeddings + sum(map(len, getattr(table, "prompt_ids", ())))
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    return max([options.vocab_size, *tables]) if hasattr(options, "vocab_size") else None


def distribute(
    config: TrainConfig, model: nn.Module, criterion: Criterion, world: World, *, fill: bool = True
) -> tuple[Runner, nn.Module]:
    """Distribute a model over the ranks, in place.

    Args:
        model: from `build_model`, with its adapter; `freeze` is applied.
        criterion: computes the loss.
        fill: whether to draw initial values for parameters on the meta device; off if a checkpoint is loaded next.

    Returns:
        The runner, and this rank's part of the model, with the parameter names of the whole model.
    """
    precision, seed = config.training.precision, config.common.seed
    record = recorder_of_passes(config, world) if config.engine.cuda_graphs else None
    if world.sizes.pipeline > 1:
        from ftk.model_parallel.pipeline.build import build_pipeline

        pipeline = build_pipeline(
            model,
            criterion,
            world,
            config.parallel,
            config.engine,
            update_freq=config.training.update_freq,
            precision=precision,
            seed=seed,
            fill=fill,
        )
        return pipeline, pipeline.part.model
    step = StepModule(model, criterion)
    parallelized = parallelize_training(
        step, world, config.parallel, config.engine, precision=precision, seed=seed, fill=fill
    )
    if record is not None:
        return RecordedRunner(record, parallelized.module, world.device, precision, weighs=criterion.weighs), model
    runner = SequentialRunner(
        parallelized.module,
        world.device,
        precision,
        many_ranks=world.size > 1,
        finishers=parallelized.finishers,
        multiple=world.sizes.tensor if config.parallel.sequence_parallel and has_two_stacks(model) else 1,
        axes=getattr(model, "INPUTS", {}),
    )
    return runner, model


def recorder_of_passes(config: TrainConfig, world: World) -> Recorder[Sums] | None:
    """What records the passes of micro-batches, for `cuda_graphs`; None on a CPU.

    Raises:
        UserError: the run is none of one process that keeps its model on the GPU.
    """
    if world.size > 1 or config.parallel.needs_fsdp:
        other = f"{world.size} processes" if world.size > 1 else "`cpu_offload` and `weights` bf16"
        raise UserError(f"`cuda_graphs` is for runs of one process whose model is whole on its GPU, not for {other}")
    return CudaGraphs(world.device) if world.device.type == "cuda" else None


def _hooks(
    config: TrainConfig, task: Task, update: Update, schedule: LRScheduler, valid_splits: Sequence[str]
) -> Hooks:
    """Those for reports, skipped updates, evaluations and the section `debug`, and those of the task and the user."""
    debug, world = config.debug, update.world
    hooks: list[Hook] = [*report_hooks(config.report, world), SkippedUpdates(update.scaler)]
    if config.evaluations.evaluate_with and valid_splits:
        from ftk.trainer.evaluations import EvaluateWith

        hooks.append(EvaluateWith(config, task, valid_splits[0], update.runner.stages[0], world))
    if config.checkpoint.save and (is_plugin(update.optimizer) or is_plugin(schedule)):
        hooks.append(CheckStates(schedule))
    if debug.profile and world.is_main:
        hooks.append(Profile(debug.profile, debug.profile_start))
    if debug.inspect_interval:
        compiled, uncounted = config.engine.compile == "model", update.runner.uncounted
        hooks.append(
            Inspection(
                debug.inspect_interval, debug.inspect, update.model, compiled=compiled, world=world, uncounted=uncounted
            )
        )
    if debug.detect_anomaly:  # after ftk's other hooks, since it removes the gradients
        hooks.append(DetectAnomaly(update))
    return Hooks([*hooks, *task.hooks(), *build_hooks(config.training.hooks)])


# -- start of a run ---------------------------------------------------------------------------------------------


def _load(run: Run, folder: Path | None) -> None:
    """Load weights and state from a checkpoint, or only weights from `finetune_from`.

    Args:
        folder: the checkpoint from `Checkpoints.find`; None: a new run.
    """
    config = run.config
    tokenizer = run.task.tokenizer.fingerprint
    data = data_identity(run.task, config.dataloader.train_subset)
    if folder is None:
        run.checkpoints.load_initial_weights(run.model, run.task)
    else:
        run.state = run.checkpoints.load(folder, run.model, run.optimizer, tokenizer, data)
    run.ema = EMA(run.model, config.ema) if config.ema.ema_decay else None
    check_best_metric(run)
    state = run.state
    if folder is not None and state.num_updates > 0:  # not of weights alone
        _load_average(folder, run.ema, run.world)
        stretch = describe_stretch(config, read_config(folder), run.updates_per_epoch, state.num_updates)
        if stretch is not None:
            logger.warning("%s", stretch)
        # Parts of the state that were reset are empty.
        if state.iterator:
            run.train_iterator.load_state_dict(state.iterator)
        if state.lr_scheduler:
            run.schedule.load_state_dict(state.lr_scheduler)
        if run.update.scaler is not None and state.loss_scale:
            run.update.scaler.load_state_dict(state.loss_scale)
    state.validation_pending = state.validation_pending and bool(run.valid_iterators)
    state.iterator = run.train_iterator.state_dict()
    state.seed = config.common.seed
    state.tokenizer, state.data = tokenizer, data
    state.data_processes = run.world.sizes.data


def _load_average(folder: Path, ema: EMA | None, world: World) -> None:
    """Load the averaged weights of a checkpoint, if it has some and the run keeps an average."""
    if "ema" not in extra_tensor_names(folder):
        return
    if ema is None:
        logger.warning("%s has averaged weights; without `ema_decay` they are dropped", folder)
        return
    # Other parameters may be frozen than before (--reset-optimizer).
    new = load_extra_tensors(folder, "ema", ema.state_dict(), world=world)
    if new:
        logger.info("the moving average starts again for %s", ", ".join(new))
