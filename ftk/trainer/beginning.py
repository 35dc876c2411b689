"""Where a run begins: anew, with the weights of another one, or where it stopped."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftk.checkpoint import extra_tensor_names, load_extra_tensors, read_config
from ftk.data.sample_dataset import lengths_of
from ftk.errors import UserError, counted
from ftk.model_parallel.world import World
from ftk.optim.ema import EMA
from ftk.trainer.continuing import data_identity, describe_stretch
from ftk.trainer.state import TrainerState
from ftk.trainer.validation import figures_to_come, with_averages

if TYPE_CHECKING:
    from ftk.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

_ALWAYS = ("loss", "ppl", "num_targets", "num_batches", "valid_seconds")  # figures of every validation


class Beginning(NamedTuple):
    """What a run begins with, besides model, optimizer, data and schedule, which stand where they are to stand.

    Attributes:
        state: of the run.
        ema: the moving average of the weights, None if there is to be none.
    """

    state: TrainerState
    ema: EMA | None


def begin(trainer: Trainer, folder: Path | None) -> Beginning:
    """Fill all that a trainer has built, from a checkpoint if there is one.

    Args:
        trainer: with everything built that holds a state.
        folder: the checkpoint that `Checkpoints.find` has found; None: a new run.

    Raises:
        UserError: the checkpoint does not go with the run.
    """
    config = trainer.config
    tokenizer = trainer.task.tokenizer.fingerprint
    data = data_identity(trainer.task, config.dataloader.train_subset)
    state = TrainerState()
    if folder is None:
        trainer.checkpoints.take_weights(trainer.model, tokenizer)
    else:
        state = trainer.checkpoints.load(folder, trainer.model, trainer.optimizer, tokenizer, data)
    ema = EMA(trainer.model, config.ema) if config.ema.ema_decay else None
    _check_best_metric(trainer)
    if folder is not None and state.num_updates > 0:  # not of weights alone
        _take_average(folder, ema, trainer.world)
        _go_on(trainer, folder, state)
    state.validation_pending = state.validation_pending and bool(trainer.valid_iterators)
    state.iterator = trainer.train_iterator.state_dict()
    state.seed = config.common.seed
    state.tokenizer, state.data = tokenizer, data
    state.data_processes = trainer.world.sizes.data
    return Beginning(state, ema)


def _take_average(folder: Path, ema: EMA | None, world: World) -> None:
    """The averaged weights of a checkpoint, if it has some and they are kept on."""
    if "ema" not in extra_tensor_names(folder):
        return
    if ema is None:
        logger.warning("%s has averaged weights; without --ema-decay they are not kept on", folder)
        return
    averages = ema.state_dict()
    # Other parameters may be frozen than before (--reset-optimizer).
    new = load_extra_tensors(folder, "ema", averages, strict=False, world=world)
    if new:
        logger.info("the moving average begins anew for %s", ", ".join(new))


def _go_on(trainer: Trainer, folder: Path, state: TrainerState) -> None:
    """Data, schedule and loss scale go on where the checkpoint's run stood, but for what is to begin anew."""
    stretch = describe_stretch(trainer.config, read_config(folder), trainer.updates_per_epoch, state.num_updates)
    if stretch is not None:
        logger.warning("%s", stretch)
    if state.iterator:
        trainer.train_iterator.load_state_dict(state.iterator)
    if state.lr_scheduler:
        trainer.schedule.load_state_dict(state.lr_scheduler)
    if trainer.update.scaler is not None and state.loss_scale:
        trainer.update.scaler.load_state_dict(state.loss_scale)


def _check_best_metric(trainer: Trainer) -> None:
    """Refuse a figure to rank by that no validation gives; one that a hook may add is only wondered at.

    Where it is not one that every validation gives, the first batch is gone through, to see which others there are.

    Raises:
        UserError: no validation gives it.
    """
    metric, averages = trainer.config.checkpoint.best_metric, trainer.config.ema.ema_decay > 0
    if not trainer.valid_iterators or metric in with_averages(_ALWAYS, averages):
        return
    first = next(iter(trainer.valid_iterators.values()))
    known = figures_to_come(trainer.runner, trainer.model, first, world=trainer.world)
    known = with_averages(known, averages)
    if metric in known:
        return
    text = f"--best-metric {metric} is none of the validation's figures: {', '.join(known)}"
    if not trainer.hooks.may_add_figures():
        raise UserError(text)
    logger.warning("%s; if no hook adds it, the run ends at its first validation", text)


def say_what_begins(trainer: Trainer) -> None:
    """The first lines of the log."""
    num_updates, total = trainer.state.num_updates, trainer.total_updates
    if num_updates > 0:
        logger.info("continuing after %s, in epoch %d", counted(num_updates, "update"), trainer.train_iterator.epoch)
    length = f"up to {counted(total, 'update')}" if total else "no limit of updates"
    precision, folder = trainer.config.training.precision, trainer.checkpoints.folder
    logger.info("training %s parameters on %s in %s", f"{trainer.num_trained:,}", trainer.device, precision)
    if trainer.world.sizes.world > 1:
        logger.info("%s", trainer.world.sizes.describe(trainer.config.parallel))
    *others, last = trainer.updates_per_epoch  # of each shard
    per_epoch = ", ".join([*map(str, others), counted(last, "update")])
    logger.info("%s an epoch, %s; run folder %s", per_epoch, length, folder)
    _warn_of_short_updates(trainer)
    if precision == "fp16" and trainer.device.type == "cpu":
        logger.warning("fp16 is slow on a CPU, several times slower than fp32; --precision bf16 is faster")
    logger.info("losses are in nats (natural logarithm) per target token; ppl is exp(loss)")


def _warn_of_short_updates(trainer: Trainer) -> None:
    """Where there are fewer samples than an update is to have, no update has what was asked for."""
    batch_size = trainer.train_iterator.limits.batch_size
    available = int(lengths_of(trainer.train_iterator.dataset).max())  # of the longest shard
    batches = trainer.config.training.update_freq * trainer.world.sizes.data
    if batch_size is None or batch_size * batches <= available or max(trainer.updates_per_epoch) > 1:
        return
    asked = f"--batch-size {batch_size}" + (f" in {batches} batches" if batches > 1 else "")
    logger.warning(
        "an update is to have %d samples (%s), and there are %d to train on: an epoch is one update of %s",
        batch_size * batches, asked, available, counted(available, "sample"),
    )  # fmt: skip
