"""The Trainer: it owns the dataloaders, the model, the optimizer and the step, and runs them to the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from ftk.batch import Batch
from ftk.checkpoint import checkpoint_name
from ftk.criterions.base import Criterion
from ftk.data.indexed.folder_layout import NoSplit
from ftk.errors import UserError, counted
from ftk.model_parallel.world import World
from ftk.optim.parameter_groups import apply_freeze, parameter_rules
from ftk.optim.schedules import group_schedules
from ftk.tasks.base import Task
from ftk.trainer import dataloading
from ftk.trainer.agreement import Agreement
from ftk.trainer.beginning import begin, say_what_begins
from ftk.trainer.building import build_optimizer, debug_hooks, spread
from ftk.trainer.checkpointing import Checkpoints
from ftk.trainer.device import resolve_device
from ftk.trainer.hooks import Hooks, build_hooks
from ftk.trainer.log.log_file import HeldLines
from ftk.trainer.log.metrics import Stopwatch, TrainingFigures
from ftk.trainer.log.output import RunOutput
from ftk.trainer.log.records import Record, plain_record
from ftk.trainer.log.run_report import report_hooks
from ftk.trainer.log.summary import Summary
from ftk.trainer.signals import StopSignals
from ftk.trainer.step import Gradients, Update
from ftk.trainer.train_config import TrainConfig
from ftk.trainer.validation import validate_splits

logger = logging.getLogger(__name__)


class NoProgress(FloatingPointError):
    """Updates bring nothing any more; every process of a run finds that at the same time."""


class Trainer:
    """Trains a model on a task, from the beginning or from where the run in `save_dir` stopped.

    Args:
        config: the whole configuration of the run.
        task: gives the samples.
        model: on the CPU, with its initial weights; of several processes it may be on the meta device.
        criterion: computes the loss.
        world: the processes of the run, each with a Trainer that does the same; None: this one alone.
        clock: seconds, rising; for tests.
        said: what has been logged before, for the log files.
    """

    def __init__(
        self,
        config: TrainConfig,
        task: Task,
        model: nn.Module,
        criterion: Criterion,
        *,
        world: World | None = None,
        clock: Callable[[], float] = time.perf_counter,
        said: HeldLines | None = None,
    ) -> None:
        self.config = config
        self.task = task
        self.criterion = criterion
        self.world = world or World.single(resolve_device(config.common.device))
        self.device = self.world.device

        update_freq = config.training.update_freq
        share = {"rank": self.world.data_rank, "ranks": self.world.sizes.data}
        self.train_iterator = dataloading.train_iterator(config.dataloader, config.common, task, update_freq, **share)
        try:
            self.valid_iterators = dataloading.valid_iterators(config.dataloader, config.common, task, **share)
        except NoSplit as error:
            raise NoSplit(f"{error} (--valid-subset none trains without validation)") from None
        self.updates_per_epoch = dataloading.updates_per_epoch(self.train_iterator, update_freq)
        self.total_updates = dataloading.total_updates(config.training, self.updates_per_epoch)

        self.stopwatch = Stopwatch(clock=clock)
        self.checkpoints = Checkpoints(config, task.corpus.tokenizer_folder, world=self.world)
        try:
            found = self.checkpoints.find()
            self._build(model, fill=found is None)
            self.state, self.ema = begin(self, found)
        except BaseException:
            self.checkpoints.release()
            raise
        self.checkpoints.prepare_folder()
        self.stopwatch.start(self.state.seconds)
        self.figures = TrainingFigures(self.device, self.stopwatch, self.world)
        if self.state.figures:
            self.figures.load_state_dict(self.state.figures)
        self.output = RunOutput(config, self.checkpoints.folder, self.state, self.total_updates, self.world, said)
        self.signals = StopSignals(several=self.world.size > 1, speaks=self.world.is_main)
        self.agreement = Agreement(self.world, self.signals, self._hours_are_over)

        self.epoch = self.train_iterator.epoch  # of the last update
        self.lr = 0.0  # of the last update
        self.gradients: Gradients  # what the last update gave besides the gradients
        self.skip: torch.Tensor  # whether it was skipped, 0-d bool on the device
        self.in_step = False  # between the first change of a parameter and the end of the bookkeeping
        self.unsaved = False  # whether there is an update or a validation that no checkpoint knows of

    # -- beginning and end ----------------------------------------------------------------------------------

    def _build(self, model: nn.Module, fill: bool) -> None:
        """What takes the updates, around the model, which is spread over the processes.

        Args:
            model: as the constructor was given it.
            fill: off: a checkpoint overwrites all its values, which need not be drawn.
        """
        config, task, criterion = self.config, self.task, self.criterion
        apply_freeze(model, config.parameters)
        options = config.optimizer.config
        if not hasattr(options, "lr"):
            raise UserError(f"optimizer {config.optimizer.name!r} must have an option `lr` for the schedule")
        # By name, and of the whole model: no process may hold all that a rule is about.
        rules = parameter_rules(model, getattr(options, "weight_decay", 0.0), config.parameters)
        self.num_trained = rules.num_elements
        self.runner, self.model = spread(config, model, criterion, self.world, fill=fill)
        self.optimizer: torch.optim.Optimizer = build_optimizer(config.optimizer, rules, self.model)
        schedule = config.lr_scheduler.build(base_lr=options.lr, total_updates=self.total_updates)
        self.schedule = group_schedules(schedule, self.optimizer, self.total_updates)

        self.update = Update(
            config,
            self.model,
            criterion,
            self.optimizer,
            self.device,
            self.stopwatch,
            runner=self.runner,
            world=self.world,
            multipliers=rules.multipliers_of(self.model),
        )

        looking = [*report_hooks(config.report, self.world), *debug_hooks(config, self.model, self.world)]
        self.hooks = Hooks([*looking, *task.hooks(), *build_hooks(config.training.hooks)])

    def train(self) -> Summary:
        """Train until a limit is reached or a signal comes, and leave a checkpoint of the last update.

        Returns:
            How it ended.

        Raises:
            Exception: whatever went wrong, after a checkpoint of the last whole update was saved if possible.
        """
        with self.output:
            say_what_begins(self)
            self.output.begin(self.state.num_updates)
            self.hooks.call("before_train", self)
            summary = self._summary(self._run())
            self.output.end(summary.num_updates, summary.reason)
            self.hooks.call("after_train", self, summary)
            for line in summary.lines():
                logger.info("%s", line)
            if summary.warning is not None:
                logger.warning("%s", summary.warning)
        return summary

    def _run(self) -> str:
        """Train to the end; returns why it is the end."""
        self.stopwatch.lap()
        reason = self._limit_reached(end_of_epoch=self.train_iterator.batches_left() == 0)
        try:
            with self.signals:
                self.output.start_progress(self.state.num_updates)
                if self.state.validation_pending:
                    reason = self._validate_and_save(reason, save_due=True)
                while reason is None:
                    reason = self._train_epoch()
        except Exception as error:
            self._rescue(error)
            self.output.end(self.state.num_updates, f"failed: {type(error).__name__}: {error}")
            raise
        except BaseException:  # a second signal: at once
            self.checkpoints.abandon()
            after = self.state.num_updates
            logger.info(
                "stopped at once, after update %d; the same command goes on from the newest checkpoint, if any", after
            )
            raise
        finally:
            self.output.close()
            self.checkpoints.release()
        for iterator in (self.train_iterator, *self.valid_iterators.values()):
            iterator.close()
        return reason

    def _summary(self, reason: str) -> Summary:
        return Summary(
            num_updates=self.state.num_updates,
            epoch=self.epoch,
            seconds=self.stopwatch.seconds(),
            best=self.state.best,
            reason=reason,
            signal=self.agreement.signal,
            folder=self.checkpoints.folder,
            saved=self.checkpoints.last_saved is not None,
            save_failure=self.checkpoints.failure,
            skipped_updates=self.figures.skipped()[0],
        )

    def _rescue(self, failure: Exception) -> None:
        """After a failure: save the last update, if that is not done and it is whole.

        Several processes save together or not at all: not where one has failed and the others know nothing of it.
        """
        if self.in_step or not self.unsaved or (self.world.size > 1 and not isinstance(failure, NoProgress)):
            return
        try:
            self._save()
        except Exception as error:  # the failure that brought us here is the one to report
            logger.error("the last update could not be saved: %s", error)

    # -- the loop -------------------------------------------------------------------------------------------

    def _train_epoch(self) -> str | None:
        """Train on what is left of the present epoch; returns why the run is to stop, None if it goes on."""
        self.epoch = self.train_iterator.epoch
        fresh = self.train_iterator.state_dict()["samples_consumed"] == 0
        if fresh and self.train_iterator.batches_left() == 0:
            split = self.config.dataloader.train_subset
            raise UserError(f"split {split!r} gives no batch; is --max-tokens too small?")
        self.model.train()
        groups = dataloading.in_groups(self.train_iterator.batches(), self.config.training.update_freq)
        while True:
            with self.stopwatch.part("data"):
                micro_batches = next(groups, None)
            if micro_batches is None:
                return None
            num_updates = self.state.num_updates
            self.train_step(micro_batches)
            if self.state.num_updates == num_updates:
                return self._validate_and_save(self._stop_agreed(), save_due=True)
            self.output.update()
            if (reason := self._after_update()) is not None:
                return reason

    def train_step(self, micro_batches: list[Batch]) -> None:
        """One update: gradients of all micro-batches, divided once by their targets, clipped once, applied.

        A loss or gradient that is infinite or not a number skips the update: parameters and optimizer stay
        as they were, `num_updates` goes on, the figures leave it out. Nothing here waits for the device.

        Where several processes have just agreed to stop, the update is not taken, and `num_updates` stays.

        Args:
            micro_batches: this process's CPU batches as the collater made them.
        """
        counts = self.agreement.before_update(self.update.count(micro_batches))
        if self.world.size > 1 and self._stop_agreed() is not None:
            return
        self.hooks.call("before_step", self, micro_batches)
        gradients = self.update.accumulate(micro_batches, self.state.num_updates, counts)
        self.hooks.call("after_backward", self)
        self.lr = self.schedule.lr(self.state.num_updates)
        self.in_step = True
        skip = self.update.apply(gradients, self.lr, self.schedule.own_lrs(self.state.num_updates))
        if self.ema is not None:
            self.ema.update(self.state.num_updates + 1, skip)
        self.figures.add(gradients.sums, skip=skip, num_tokens=gradients.num_tokens, num_targets=gradients.num_targets)
        self.state.num_updates += 1
        self.state.iterator = self.train_iterator.state_dict()
        self.unsaved = True
        self.in_step = False
        self.gradients, self.skip = gradients, skip
        self.hooks.call("after_step", self)

    def _after_update(self) -> str | None:
        """Log, validate and save where due; returns why the run is to stop, None if it goes on."""
        training, checkpoint = self.config.training, self.config.checkpoint
        num_updates = self.state.num_updates
        self.checkpoints.collect(wait=False)  # says it if the last save has failed
        # The iterator may or may not have gone on to the next epoch when its last batch is out.
        end_of_epoch = self.train_iterator.epoch != self.epoch or self.train_iterator.batches_left() == 0
        if end_of_epoch:
            self.hooks.call("after_epoch", self)
        reason = self._limit_reached(end_of_epoch)
        last = reason is not None
        validation_due = last or _due(num_updates, training.validate_interval_updates)
        validation_due |= end_of_epoch and _due(self.epoch, training.validate_interval)
        self.state.validation_pending = validation_due and bool(self.valid_iterators)
        save_due = last or _due(num_updates, checkpoint.save_interval_updates)
        save_due |= end_of_epoch and _due(self.epoch, checkpoint.save_interval)
        if last or _due(num_updates, self.config.logging.log_interval):
            self._log()
        return self._validate_and_save(reason, save_due)

    def _limit_reached(self, end_of_epoch: bool) -> str | None:
        """Which of the run's own limits is reached."""
        training = self.config.training
        if training.max_update is not None and self.state.num_updates >= training.max_update:
            return f"max_update {training.max_update} is reached"
        if training.max_epoch is not None:
            done = self.epoch if end_of_epoch else self.train_iterator.epoch - 1
            if done >= training.max_epoch:
                return f"max_epoch {training.max_epoch} is reached"
        if self.agreement.hours_over:
            return self._hours_reason()
        lr = training.stop_min_lr
        if lr is not None and self.schedule.has_fallen_to(lr, self.state.num_updates):
            return f"the learning rate has fallen to stop_min_lr {lr:g}"
        if training.patience and self.state.validations_without_best >= training.patience:
            return f"no better {self.config.checkpoint.best_metric} in {counted(training.patience, 'validation')}"
        return None

    def _hours_are_over(self) -> bool:
        hours = self.config.training.stop_time_hours
        return hours is not None and self.stopwatch.seconds() >= 3600 * hours

    def _stop_agreed(self) -> str | None:
        """Why the processes of the run have just agreed to stop before the next update, None if they go on.

        Only of what they tell each other: the run's other limits were looked at after the last update, and the epoch
        may have ended with the batches of this one.
        """
        if self.agreement.signal is not None:
            return f"{self.agreement.signal} was received"
        return self._hours_reason() if self.agreement.hours_over else None

    def _hours_reason(self) -> str:
        return f"stop_time_hours {self.config.training.stop_time_hours:g} are over"

    def _validate_and_save(self, reason: str | None, save_due: bool) -> str | None:
        """Validate if it is pending; save if due, on a new best and before a stop.

        Returns why the run is to stop, `reason` if it was to anyway, None if it goes on.
        """
        is_best = False
        with self.stopwatch.aside():
            if self.state.validation_pending and self.agreement.signal is None:
                with self.stopwatch.part("validation"):
                    is_best = self._validate()
                reason = reason or self._limit_reached(end_of_epoch=False)
            if self.agreement.signal is not None:
                reason = f"{self.agreement.signal} was received"
            if save_due or is_best or reason is not None:
                with self.stopwatch.part("checkpoint"):
                    self._save()
        return reason

    # -- validation, figures, saving ------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Validate on every split; the first one ranks. Returns whether it is the best until now."""
        self.hooks.call("before_validation", self)
        results = self._validate_splits()
        if results is not None and self.ema is not None:
            with self.ema.swapped_in():
                averaged = self._validate_splits()
            if averaged is None:
                return False
            for split, figures in averaged.items():
                results[split] |= {f"ema_{name}": value for name, value in figures.items() if "num_" not in name}
        if results is None:
            return False  # still pending: done from the start when the run continues
        self.hooks.call("after_validation", self, results)
        # A hook may add a figure on one process alone, or another one on each; what it decides is decided by all.
        results = self.world.broadcast_json({split: plain_record(figures) for split, figures in results.items()})
        is_best = self._rank(next(iter(results.values())))
        self.state.validation_pending = False
        self.unsaved = True
        for split, figures in results.items():
            record = {"event": "valid", "subset": split, "num_updates": self.state.num_updates}
            self._write({**record, "epoch": self.epoch, **figures, "seconds": self.stopwatch.seconds()})
        return is_best

    def _validate_splits(self) -> dict[str, Record] | None:
        """The figures of each split with the present weights; None if a signal came."""
        return validate_splits(
            self.runner,
            self.model,
            self.valid_iterators,
            device=self.device,
            world=self.world,
            should_stop=self.agreement.should_stop,
        )

    def _rank(self, figures: Record) -> bool:
        """Let a validation count for the best checkpoint, patience and the schedule. Returns whether it is the best."""
        options = self.config.checkpoint
        metric = options.best_metric
        if metric not in figures:
            known = ", ".join(figures)
            raise UserError(f"--best-metric {metric} is none of the validation's figures: {known}")
        maximize = options.maximize_best_metric
        self.schedule.observe(figures[metric], num_updates=self.state.num_updates, maximize=maximize)
        return self.state.rank(metric, figures[metric], maximize)

    def _log(self) -> None:
        """Write the record of the updates since the last one: the only place where the host waits."""
        skipped, in_a_row = self.figures.skipped()
        record: Record = {"event": "train", "num_updates": self.state.num_updates, "epoch": self.epoch}
        record |= {"lr": self.lr, **self.figures.record()}
        if self.update.scaler is not None:  # no mean: it is wanted most where every update was skipped
            record["loss_scale"] = self.update.scaler.scale.item()
        record["skipped_updates"] = skipped
        self._write({**record, "seconds": self.stopwatch.seconds()})
        if self.update.scaler is not None and self.update.scaler.overflows_at_floor():
            floor = self.config.loss_scale.fp16_min_scale
            raise NoProgress(
                f"gradients overflow though the loss scale is at its floor of {floor:g}; lower --lr, "
                f"lengthen --warmup-updates, or take --precision bf16"
            )
        limit = self.config.training.max_nonfinite_updates
        if limit and in_a_row >= limit:
            raise NoProgress(
                f"the last {in_a_row} updates were all skipped, loss or gradient is not finite; lower --lr, "
                f"lengthen --warmup-updates, or go on from an older checkpoint"
            )

    def _write(self, record: Record) -> None:
        with self.stopwatch.part("log"):
            self.hooks.call("on_record", self, record)
            record = plain_record(record)
            self.output.show(record)

    def _save(self) -> None:
        if not self.unsaved:
            return
        self.unsaved = False  # even if it fails: then the disk is the reason, and trying again is no help
        self.state.figures = self.figures.state_dict()
        self.state.seconds = self.stopwatch.seconds()
        self.state.lr_scheduler = self.schedule.state_dict()
        self.state.loss_scale = self.update.scaler.state_dict() if self.update.scaler else {}
        self.hooks.call("before_checkpoint", self)
        extra = {"ema": self.ema.state_dict()} if self.ema is not None else None
        self.checkpoints.save(self.state, self.model, self.optimizer, extra)
        self.hooks.call("after_checkpoint", self, self.checkpoints.folder / checkpoint_name(self.state.num_updates))


def _due(number: int, interval: int) -> bool:
    """Whether `number` is a multiple of `interval`; never for an interval of 0."""
    return interval > 0 and number % interval == 0
