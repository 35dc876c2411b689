"""The learning rate range test: the loss over a learning rate that rises with each update (Smith 2015)."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftk.config import Chosen
from ftk.errors import UserError, counted
from ftk.files import write_whole
from ftk.optim.schedules import LRScheduler, LRSchedulerConfig
from ftk.registry import LR_SCHEDULERS
from ftk.trainer.config import TrainConfig
from ftk.trainer.dataloading import in_groups
from ftk.trainer.trainer import Trainer
from ftk.trainer.watch.config import LRRangeConfig

logger = logging.getLogger(__name__)

FOLDER = "lr_range"  # in the run's folder
ROWS = 20  # of the printed table
RISE = 1.5  # times the lowest loss: from there on larger rates show nothing more
FALL = 0.01  # share of the first loss by which the loss must fall; less is taken for noise


class Sweep(LRScheduler):
    """Rises from `lr_range_start` at update `first` to `lr_range_end` by the same factor in each update."""

    def __init__(self, options: LRRangeConfig, first: int = 0) -> None:
        super().__init__(LRSchedulerConfig(), base_lr=options.lr_range_start)
        self.first = first
        self.factor = (options.lr_range_end / options.lr_range_start) ** (1 / (options.lr_range_updates - 1))

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * self.factor ** (num_decayed - self.first)


@dataclass(frozen=True)
class LRRange:
    """The result of a range test: rate and loss of each update with a finite loss, and whether the loss diverged."""

    rates: list[float]
    losses: list[float]
    diverged: bool

    @property
    def smoothed(self) -> list[float]:
        """The losses, each averaged with its neighbours."""
        reach = max(1, len(self.losses) // 20)
        return [float(np.mean(self.losses[max(0, i - reach) : i + reach + 1])) for i in range(len(self.losses))]

    @property
    def suggestion(self) -> float | None:
        """A peak learning rate: that at the steepest fall of the smoothed loss, or a tenth of that at its minimum if
        that is smaller; None if the loss never falls."""
        smoothed = self.smoothed
        lowest = int(np.argmin(smoothed))
        if lowest < 2 or smoothed[0] - smoothed[lowest] < FALL * abs(smoothed[0]):
            return None
        slopes = np.gradient(smoothed[: lowest + 1], np.log(self.rates[: lowest + 1]))
        return min(self.rates[int(np.argmin(slopes))], self.rates[lowest] / 10)


def range_config(config: TrainConfig) -> TrainConfig:
    """The configuration of a range test: in its own folder, without validation, checkpoints, schedule, moving average,
    report, TensorBoard and Weights & Biases.

    It starts with the weights of `restore_from` or `finetune_from`, otherwise with initial weights.
    """
    checkpoint = config.checkpoint
    return dataclasses.replace(
        config,
        lr_scheduler=Chosen(LR_SCHEDULERS.get("constant"), LRSchedulerConfig()),
        dataloader=dataclasses.replace(config.dataloader, valid_subset=None),
        training=dataclasses.replace(
            config.training, max_update=config.lr_range.lr_range_updates, max_epoch=None, stop_time_hours=None
        ),
        checkpoint=dataclasses.replace(
            checkpoint,
            save_dir=str(Path(checkpoint.save_dir) / FOLDER),
            save=False,
            restore_from=None,
            finetune_from=checkpoint.finetune_from or checkpoint.restore_from,
        ),
        ema=dataclasses.replace(config.ema, ema_decay=0.0),
        report=dataclasses.replace(config.report, report=False, tensorboard_dir=None, wandb_project=None),
    )


def lr_range_test(trainer: Trainer) -> LRRange:
    """Run a range test.

    Args:
        trainer: new, of a `range_config`; do not use its weights afterwards.

    Returns:
        Rates and losses up to the end, or until the loss diverges: not finite, more than four times the lowest or one
        and a half times the first (averages over a few updates).

    Raises:
        UserError: the training split gives no batch, or the first losses are not finite.
    """
    run, options = trainer.run, trainer.run.config.lr_range
    num_updates, first = options.lr_range_updates, run.state.num_updates
    sweep = Sweep(options, first)
    run.schedule = sweep
    run.model.train()
    run.hooks.call("before_train", trainer.info)  # other methods of hooks may rely on it
    rates: list[float] = []
    losses: list[float] = []
    few = max(1, num_updates // 20)
    recent: list[float] = []  # averages of few losses
    diverged = False
    try:
        while len(rates) < num_updates and not diverged:
            if run.train_iterator.batches_left() == 0:
                split = run.config.dataloader.train_subset
                raise UserError(f"split {split!r} gives no batch; is `max_tokens` too small?")
            for micro_batches in in_groups(run.train_iterator, run.config.training.update_freq):
                trainer.train_step(micro_batches)
                loss = trainer.figures.record()["loss"]
                if diverged := not math.isfinite(loss):
                    break
                rates.append(sweep.lr(first + len(rates)))
                losses.append(loss)
                recent.append(float(np.mean(losses[-few:])))
                begin = recent[min(few, len(recent)) - 1]
                diverged = len(recent) > few and (recent[-1] > 4 * min(recent) or recent[-1] > 1.5 * begin)
                if len(rates) % few == 0:
                    logger.info("update %d of %d: lr %.2e, loss %.4f", len(rates), num_updates, rates[-1], recent[-1])
                if diverged or len(rates) == num_updates:
                    break
    finally:
        trainer.output.close()
        run.checkpoints.release()
    run.end_data_workers()
    if len(losses) < 3:
        raise UserError(
            f"`lr_range_test`: the loss was not finite after {counted(len(losses), 'update')}; lower `lr_range_start`"
        )
    return LRRange(rates, losses, diverged)


def write_range(found: LRRange, folder: Path) -> Path:
    """Write the figures, `lr_range.json`; returns its path."""
    values = {"lr": found.rates, "loss": found.losses, "smoothed": found.smoothed, "diverged": found.diverged}
    write_whole(folder / "lr_range.json", json.dumps({**values, "suggestion": found.suggestion}) + "\n")
    return folder / "lr_range.json"


def describe_range(found: LRRange) -> Iterator[str]:
    """A table of the result, and the suggestion."""
    smoothed = found.smoothed
    yield f"{'learning rate':>13}  {'loss':>10}  {'smoothed':>10}"
    for i in np.unique(np.linspace(0, len(found.rates) - 1, min(ROWS, len(found.rates))).round().astype(int)):
        yield f"{found.rates[i]:>13.2e}  {found.losses[i]:>10.4f}  {smoothed[i]:>10.4f}"
    if found.diverged:
        yield f"the loss diverges after {found.rates[-1]:.2e}"
    if found.suggestion is None:
        yield "the loss does not fall: no rate can be suggested; try a larger `lr_range_end` or more updates"
        return
    yield f"lowest loss    at {found.rates[int(np.argmin(smoothed))]:.2e}"
    yield f"suggestion     `lr` {found.suggestion:.1e} (as the peak of a schedule with warm-up)"
    if not found.diverged and smoothed[-1] < RISE * min(smoothed):
        yield f"the last loss is below {RISE:g} times the lowest; try a larger `lr_range_end` to see more"
