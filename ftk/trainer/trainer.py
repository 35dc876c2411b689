"""The Trainer: the training loop with its updates, validations, records and checkpoints."""

from __future__ import annotations

import dataclasses
import logging

from ftk.batch import Batch
from ftk.checkpoint import checkpoint_name
from ftk.checkpoint.encoding import state_to_save
from ftk.errors import Diverged, UserError, counted
from ftk.evaluation.unigram import Unigram
from ftk.trainer import dataloading
from ftk.trainer.hooks import StepInfo
from ftk.trainer.log.log_file import HeldLines
from ftk.trainer.log.metrics import TrainingFigures
from ftk.trainer.log.output import RunOutput
from ftk.trainer.log.records import Record, plain_record
from ftk.trainer.log.summary import Summary
from ftk.trainer.run import Run
from ftk.trainer.signals import StopSignals
from ftk.trainer.step import Coordinator
from ftk.trainer.validation import validate_splits

logger = logging.getLogger(__name__)


class NoProgress(Diverged):
    """Further updates would not train the model; raised on every rank of a run at the same time."""


class Trainer:
    """Trains until a limit is reached or a signal is received: `Trainer(build_run(config)).train()`.

    Args:
        run: the parts of the run; each rank has a Trainer.
        held_lines: earlier log lines, for the log files.

    Attributes:
        run: as given.
        state: `run.state`.
        info: the argument of hooks.
        figures: sums and rates since the last record.
    """

    def __init__(self, run: Run, *, held_lines: HeldLines | None = None) -> None:
        self.run = run
        self.state = run.state
        self.figures = TrainingFigures(run.world, run.stopwatch, run.update.criterion)
        if run.state.figures:
            self.figures.load_state_dict(run.state.figures)
        folder = run.checkpoints.folder
        self.output = RunOutput(run.config, folder, run.state, run.total_updates, run.world, held_lines)
        self.signals = StopSignals(many_ranks=run.world.size > 1, reports=run.world.is_main)
        self.coordinator = Coordinator(run.world, self.signals, self._hours_are_over)
        self.info = StepInfo(
            run.config, run.model, run.optimizer, run.world, folder, run.stopwatch,
            num_updates=run.state.num_updates, epoch=run.train_iterator.epoch,
        )  # fmt: skip
        self._unigram: Unigram | None = None  # of the training split, counted at the first validation
        self._last_valid: Record = {}  # figures of the first split at the last validation
        self._in_step = False  # between the first change of a parameter and the end of the bookkeeping
        self._unsaved = False  # whether no checkpoint holds the last update or validation

    # -- start and end --------------------------------------------------------------------------------------

    def train(self) -> Summary:
        """Train until a limit is reached or a signal is received, and save a checkpoint of the last update.

        Raises:
            Exception: any failure; a checkpoint of the last completed update is saved first if possible.
        """
        with self.output:
            self.run.describe()
            self.output.begin(self.state.num_updates)
            self.run.hooks.call("before_train", self.info)
            summary = self._summary(self._run())
            self.output.end(summary.num_updates, summary.reason)
            self.run.hooks.call("after_train", self.info, summary)
            for line in summary.lines():
                logger.info("%s", line)
            if summary.warning is not None:
                logger.warning("%s", summary.warning)
        return summary

    def _run(self) -> str:
        """Train to the end; returns the reason for the end."""
        self.run.stopwatch.lap()
        if self.run.config.training.validate_at_start and self.run.checkpoints.last_saved is None:
            self.state.validation_pending |= self.state.num_updates == 0 and bool(self.run.valid_iterators)
        reason = self._limit_reached(end_of_epoch=self.run.train_iterator.batches_left() == 0)
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
            self.run.end_data_workers()
            raise
        except BaseException:  # a second signal, perhaps inside a queue of the data workers: they are left alone
            self.run.checkpoints.abandon()
            logger.info(
                "stopped at once, after update %d; the same command continues from the newest checkpoint, if any",
                self.state.num_updates,
            )
            raise
        finally:
            self.output.close()
            self.run.checkpoints.release()
        self.run.end_data_workers()
        return reason

    def _summary(self, reason: str) -> Summary:
        config = self.run.config
        user_dir = config.common.user_dir
        loss_name = "nll_loss" if "nll_loss" in self._last_valid else "loss"
        return Summary(
            num_updates=self.state.num_updates,
            epoch=self.info.epoch,
            seconds=self.run.stopwatch.seconds(),
            best=self.state.best,
            reason=reason,
            signal=self.coordinator.signal,
            folder=self.run.checkpoints.folder,
            saved=self.run.checkpoints.last_saved is not None,
            save_failure=self.run.checkpoints.failure,
            skipped_updates=self.figures.skipped()[0],
            loss=self._last_valid.get(loss_name),
            loss_name=loss_name,
            unigram_loss=self._last_valid.get("unigram_loss"),
            warmup_updates=getattr(self.run.schedule, "warmup_updates", 0),
            generates=self._generates(),
            evaluation=getattr(self.run.task, "evaluation", None),
            data=self._data(),
            user_dir=None if user_dir is None else str(user_dir),
        )

    def _data(self) -> str:
        """What the next command reads: the run's folder, or of rows the file that it was validated with."""
        task, config = self.run.task, self.run.config
        if getattr(task, "evaluation", None) is not None and hasattr(task.corpus, "file"):
            split = next(iter(self.run.valid_iterators), config.dataloader.train_subset)
            return task.corpus.file(split) or "FILE"  # the rows that were held out have none
        return str(getattr(config.dataset.config, "data", "DATA"))

    def _generates(self) -> bool:
        """Whether the model can be asked for text, with this tokenizer."""
        task = self.run.task
        try:
            framing = task.framing(task.tokenizer, self.run.config.model.config)
            return framing is not None or not task.text_generator().needs_framing
        except UserError:
            return False

    def _rescue(self, failure: Exception) -> None:
        """After a failure: save the last update, if it is complete and not saved.

        Saving is a collective operation, so several ranks save only if all of them have raised.
        """
        if self._in_step or not self._unsaved or (self.run.world.size > 1 and not isinstance(failure, NoProgress)):
            return
        try:
            self._save()
        except Exception as error:  # the caller reports the first failure
            if str(error) != str(failure):
                logger.error("the last update could not be saved: %s", error)

    # -- the loop -------------------------------------------------------------------------------------------

    def _train_epoch(self) -> str | None:
        """Train on the rest of the current epoch; returns the reason to stop the run, None if it continues."""
        iterator, config = self.run.train_iterator, self.run.config
        self.info = dataclasses.replace(self.info, epoch=iterator.epoch)
        if iterator.state_dict()["samples_consumed"] == 0 and iterator.batches_left() == 0:
            raise UserError(f"split {config.dataloader.train_subset!r} gives no batch; is `max_tokens` too small?")
        self.run.model.train()
        groups = dataloading.in_groups(iterator, config.training.update_freq)
        while True:
            with self.run.stopwatch.part("data"):
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

        If loss or gradient is infinite or NaN, the update is skipped: parameters and optimizer state do not change, and
        the figures leave it out, but `num_updates` counts it. Nothing here waits for the device.

        If the ranks agree to stop before the update, it is not taken, and `num_updates` stays.

        Args:
            micro_batches: this rank's CPU batches as the collater made them.
        """
        run, state, update, hooks = self.run, self.state, self.run.update, self.run.hooks
        if update.is_cold:
            with run.stopwatch.aside():
                update.warm_up(micro_batches)
        counts = self.coordinator.before_update(update.count(micro_batches))
        if run.world.mesh is not None and self._stop_agreed() is not None:
            return
        hooks.call("before_step", self.info, micro_batches)
        if not micro_batches:
            hooks.refuse_no_batches()
        with update.gradients(state.num_updates, counts) as scale:
            sums = update.runner.forward_backward(micro_batches, scale)
        lr = run.schedule.lr(state.num_updates)
        self.info = dataclasses.replace(
            self.info, lr=lr, sums=sums, num_tokens=counts.num_tokens, num_targets=counts.num_targets
        )
        hooks.call("after_backward", self.info)
        self._in_step = True
        skip = update.apply(sums, lr)
        if run.ema is not None:
            run.ema.update(state.num_updates + 1, skip)
        self.figures.add(sums, skip=skip, num_tokens=counts.num_tokens, num_targets=counts.num_targets)
        state.num_updates += 1
        state.iterator = run.train_iterator.state_dict()
        self._unsaved = True
        self._in_step = False
        self.info = dataclasses.replace(self.info, num_updates=state.num_updates, skip=skip)
        hooks.call("after_step", self.info)

    def _after_update(self) -> str | None:
        """Log, validate and save if due; returns the reason to stop the run, None if it continues."""
        run, training, checkpoint = self.run, self.run.config.training, self.run.config.checkpoint
        num_updates, epoch = self.state.num_updates, run.train_iterator.epoch
        run.checkpoints.collect(wait=False)  # warns if the last save has failed
        end_of_epoch = run.train_iterator.batches_left() == 0
        if end_of_epoch:
            run.hooks.call("after_epoch", self.info)
        reason = self._limit_reached(end_of_epoch)
        last = reason is not None
        validation_due = last or _due(num_updates, training.validate_interval_updates)
        validation_due |= end_of_epoch and _due(epoch, training.validate_interval)
        self.state.validation_pending = validation_due and bool(run.valid_iterators)
        save_due = last or _due(num_updates, checkpoint.save_interval_updates)
        save_due |= end_of_epoch and _due(epoch, checkpoint.save_interval)
        if last or _due(num_updates, run.config.logging.log_interval):
            self._log()
        return self._validate_and_save(reason, save_due)

    def _limit_reached(self, end_of_epoch: bool) -> str | None:
        """The limit of the run that is reached, None if none is."""
        training = self.run.config.training
        if training.max_update is not None and self.state.num_updates >= training.max_update:
            return f"max_update {training.max_update} is reached"
        if training.max_epoch is not None:
            done = self.info.epoch if end_of_epoch else self.run.train_iterator.epoch - 1
            if done >= training.max_epoch:
                return f"max_epoch {training.max_epoch} is reached"
        if self.coordinator.hours_over:
            return self._hours_reason()
        lr = training.stop_min_lr
        if lr is not None and self.run.schedule.has_fallen_to(lr, self.state.num_updates):
            return f"the learning rate has fallen to stop_min_lr {lr:g}"
        if training.patience and self.state.validations_without_best >= training.patience:
            return f"no better {self.run.config.checkpoint.best_metric} in {counted(training.patience, 'validation')}"
        return None

    def _hours_are_over(self) -> bool:
        hours = self.run.config.training.stop_time_hours
        return hours is not None and self.run.stopwatch.seconds() >= 3600 * hours

    def _stop_agreed(self) -> str | None:
        """Why the ranks agreed to stop before the next update, None if they continue.

        The other limits of the run were checked after the last update.
        """
        if self.coordinator.signal is not None:
            return f"{self.coordinator.signal} was received"
        return self._hours_reason() if self.coordinator.hours_over else None

    def _hours_reason(self) -> str:
        return f"stop_time_hours {self.run.config.training.stop_time_hours:g} are over"

    def _validate_and_save(self, reason: str | None, save_due: bool) -> str | None:
        """Validate if it is pending; save if due, on a new best and before a stop.

        Returns:
            The reason to stop the run, `reason` if that is given, None if it continues.
        """
        is_best = False
        with self.run.stopwatch.aside():
            if self.state.validation_pending and self.coordinator.signal is None:
                with self.run.stopwatch.part("validation"):
                    is_best = self._validate()
                reason = reason or self._limit_reached(end_of_epoch=False)
            if self.coordinator.signal is not None:
                reason = f"{self.coordinator.signal} was received"
            if save_due or is_best or reason is not None:
                with self.run.stopwatch.part("checkpoint"):
                    self._save()
        return reason

    # -- validation, figures, saving ------------------------------------------------------------------------

    def _validate(self) -> bool:
        """Validate on every split, and rank by the first one. Returns whether it is the best so far."""
        self.run.hooks.call("before_validation", self.info)
        if self._unigram is None and "loss" in self.run.update.criterion.nats:
            self._unigram = self.run.task.unigram(self.run.config.dataloader.train_subset)
        results = self._validate_splits(self._unigram)
        if results is not None and self.run.ema is not None:
            with self.run.ema.swapped_in():
                averaged = self._validate_splits()
            if averaged is None:
                return False
            for split, figures in averaged.items():
                results[split] |= {f"ema_{name}": value for name, value in figures.items() if "num_" not in name}
        if results is None:
            return False  # still pending: repeated when the run continues
        self.run.hooks.call("after_validation", self.info, results)
        # Hooks may add different figures on different ranks; those of the main rank count.
        results = self.run.world.broadcast_json({split: plain_record(figures) for split, figures in results.items()})
        self._last_valid = next(iter(results.values()))
        is_best = self._rank(self._last_valid)
        self.state.validation_pending = False
        self._unsaved = True
        for split, figures in results.items():
            record = {"event": "valid", "subset": split, "num_updates": self.state.num_updates}
            self._write({**record, "epoch": self.info.epoch, **figures, "seconds": self.run.stopwatch.seconds()})
        return is_best

    def _validate_splits(self, unigram: Unigram | None = None) -> dict[str, Record] | None:
        """The figures of each split with the current weights; None if a signal was received."""
        return validate_splits(
            self.run.update.runner,
            self.run.model,
            self.run.valid_iterators,
            world=self.run.world,
            should_stop=self.coordinator.should_stop,
            nats=self.run.update.criterion.nats,
            unigram=unigram,
            of_scored=self.run.task.figures,
        )

    def _rank(self, figures: Record) -> bool:
        """Use a validation for the best checkpoint, patience and the schedule. Returns whether it is the best."""
        options = self.run.config.checkpoint
        metric = options.best_metric
        if metric not in figures:
            known = ", ".join(figures)
            raise UserError(f"`best_metric` {metric} is not one of the validation's figures: {known}")
        self.run.schedule.observe(figures[metric], num_updates=self.state.num_updates, maximize=options.maximizes)
        return self.state.rank(metric, figures[metric], options.maximizes)

    def _log(self) -> None:
        """Write the record of the updates since the last one; only here the host waits for the device."""
        skipped, in_a_row = self.figures.skipped()
        record: Record = {"event": "train", "num_updates": self.state.num_updates, "epoch": self.info.epoch}
        record |= {"lr": self.info.lr, **self.figures.record()}
        scaler = self.run.update.scaler
        if scaler is not None:  # not averaged: a mean would leave out skipped updates, which change it
            record["loss_scale"] = scaler.scale.item()
        record["skipped_updates"] = skipped
        self._write({**record, "seconds": self.run.stopwatch.seconds()})
        if scaler is not None and scaler.overflows_at_floor():
            floor = self.run.config.loss_scale.fp16_min_scale
            raise NoProgress(
                f"gradients overflow though the loss scale is at its floor of {floor:g}; lower `lr`, "
                f"lengthen `warmup_updates`, or use `precision` bf16"
            )
        limit = self.run.config.training.max_nonfinite_updates
        if limit and in_a_row >= limit:
            raise NoProgress(
                f"the last {in_a_row} updates were all skipped, loss or gradient is not finite; lower `lr`, "
                f"lengthen `warmup_updates`, or continue from an older checkpoint"
            )

    def _write(self, record: Record) -> None:
        with self.run.stopwatch.part("log"):
            self.run.hooks.call("on_record", self.info, record)
            record = plain_record(record)
            self.output.show(record)

    def _save(self) -> None:
        if not self._unsaved:
            return
        self._unsaved = False  # also if this fails: on a bad disk, a second attempt fails too
        run, state, scaler = self.run, self.state, self.run.update.scaler
        state.figures = self.figures.state_dict()
        state.seconds = run.stopwatch.seconds()
        state.lr_scheduler = state_to_save(run.schedule) if run.config.checkpoint.save else {}
        state.loss_scale = scaler.state_dict() if scaler is not None else {}
        run.hooks.call("before_checkpoint", self.info)
        extra = {"ema": run.ema.state_dict()} if run.ema is not None else None
        run.checkpoints.save(state, run.model, run.optimizer, extra)
        run.hooks.call("after_checkpoint", self.info, run.checkpoints.folder / checkpoint_name(state.num_updates))


def _due(number: int, interval: int) -> bool:
    """Whether `number` is a multiple of `interval`; never for an interval of 0."""
    return interval > 0 and number % interval == 0
