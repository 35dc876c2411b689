"""Checks of the parts of a run at its start: errors and warnings about what its user would not expect."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftk.checkpoint.encoding import state_to_save
from ftk.checkpoint.load import find_sources, names_of_tensors, some_names
from ftk.checkpoint.naming import model_tensors
from ftk.checkpoint.quantize import prepare_for
from ftk.checkpoint.snapshot import described_optimizer
from ftk.data.sample_dataset import lengths_of
from ftk.errors import UserError, counted
from ftk.modules.classifier import WithClassifier, replace_head
from ftk.modules.initialization import undrawn
from ftk.optim.schedules import LRScheduler
from ftk.trainer.config import TrainConfig
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.validation import figures_to_come, with_averages

if TYPE_CHECKING:
    from ftk.trainer.run import Run

logger = logging.getLogger(__name__)

_ALWAYS = ("loss", "num_targets", "num_batches", "valid_seconds")  # figures of every validation


class CheckStates(Hook):
    """For an optimizer or a schedule of a plugin: a state that cannot be saved ends the run at its first update, not at
    its first checkpoint."""

    def __init__(self, schedule: LRScheduler) -> None:
        self._schedule = schedule
        self._had_state: bool | None = None  # of the optimizer, at the last check

    def after_step(self, step: StepInfo) -> None:
        has_state = bool(step.optimizer.state)  # not after an update that was skipped, nor of all optimizers
        if self._had_state is None:
            state_to_save(self._schedule)
        if self._had_state is None or has_state > self._had_state:
            described_optimizer(step.model, step.optimizer)
            self._had_state = has_state


def warn_of_other_model(model: nn.Module, config: TrainConfig, sections: Mapping[str, Any]) -> None:
    """Warn if checkpoints of a model will not fit the one that is built of their configuration.

    Where the two share no tensor, the model was given in Python and the architecture is only a default: that is logged
    as information.

    Args:
        model: whole, also on the meta device, before its adapter is put on.
        sections: from `quantization_of_base`.
    """
    try:
        with torch.device("meta"), undrawn():
            registered = config.model.build()
            if isinstance(model, WithClassifier):
                replace_head(registered, model.classifier.shape)
            prepare_for(sections, registered)
    except Exception:  # a plugin's class may need values where it is built
        return
    tensors, aliases = model_tensors(model)
    names = {name: name for name in tensors} | aliases
    known = {name for names in names_of_tensors(registered).values() for name in names}
    found, *misfit = find_sources(tensors, names, registered, known)
    if any(misfit):
        logger.log(
            logging.WARNING if found else logging.INFO,
            "checkpoints of this run cannot be opened by ftk.load_model and ftk's commands, which build the model from "
            "its options alone, here `arch` %s (what differs: %s); make the change in a class with @register_model",
            config.model.arch or config.model.name, some_names([*itertools.chain(*misfit)]),
        )  # fmt: skip


def check_best_metric(run: Run) -> None:
    """Refuse a `best_metric` that validations do not have; only warn if a plugin's hook may add it.

    If it is not a figure of every validation, the first batch is evaluated to find the others.
    """
    metric, averages = run.config.checkpoint.best_metric, run.config.ema.ema_decay > 0
    of_hooks = run.hooks.added_figures()
    always = (*_ALWAYS, "ppl") if "loss" in run.update.criterion.nats else _ALWAYS
    if not run.valid_iterators or metric in (*with_averages(always, averages), *of_hooks):
        return
    first = next(iter(run.valid_iterators.values()))
    known = figures_to_come(
        run.update.runner,
        run.model,
        first,
        world=run.world,
        nats=run.update.criterion.nats,
        of_scored=run.task.figures,
    )
    known = [*with_averages(known, averages), *of_hooks]
    if metric in known:
        return
    text = f"`best_metric` {metric} is not one of the validation's figures: {', '.join(known)}"
    if not run.hooks.may_add_figures():
        raise UserError(text)
    logger.warning("%s; if no hook adds it, the run ends at its first validation", text)


def warn_of_short_updates(run: Run) -> None:
    """Warn if the training set has fewer samples than an update needs."""
    batch_size = run.train_iterator.limits.batch_size
    available = int(lengths_of(run.train_iterator.dataset).max())  # of the longest shard
    batches = run.config.training.update_freq * run.world.sizes.data
    if batch_size is None or batch_size * batches <= available or max(run.updates_per_epoch) > 1:
        return
    asked = f"`batch_size` {batch_size}" + (f" in {batches} batches" if batches > 1 else "")
    logger.warning(
        "only %s to train on, fewer than the batch of %d (%s): each epoch is one update of %d",
        counted(available, "sample"), batch_size * batches, asked, available,
    )  # fmt: skip


def log_busy_machine() -> None:
    """Log a line where more than half of the cores have been in use, so that slow is not taken for hung."""
    try:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # not on this system
        return
    if load > cores / 2:
        logger.info("this machine is busy (load average %.1f on %s): updates are slower", load, counted(cores, "core"))
