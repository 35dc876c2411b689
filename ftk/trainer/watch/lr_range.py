"""The learning rate range test: the loss over a rate that rises from update to update (Smith 2015)."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftk.batch import Batch
from ftk.config import Chosen
from ftk.errors import UserError, counted
from ftk.files import write_whole
from ftk.optim.schedules import GroupSchedules, LRScheduler, LRSchedulerConfig
from ftk.registry import LR_SCHEDULERS
from ftk.trainer import dataloading
from ftk.trainer.train_config import TrainConfig
from ftk.trainer.trainer import Trainer
from ftk.trainer.watch.lr_range_chart import chart
from ftk.trainer.watch.lr_range_config import LRRangeConfig

logger = logging.getLogger(__name__)

FOLDER = "lr_range"  # in the run's folder
ROWS = 20  # of the printed table
FALL = 0.01  # share of the first loss by which the loss must fall for it to be more than noise


class Sweep(LRScheduler):
    """start at update `first`, end at update `first + num_updates - 1`, by the same factor from each to the next."""

    def __init__(self, options: LRRangeConfig, first: int = 0) -> None:
        super().__init__(LRSchedulerConfig(), base_lr=options.lr_range_start)
        self.first = first
        self.factor = (options.lr_range_end / options.lr_range_start) ** (1 / (options.lr_range_updates - 1))

    def decayed(self, num_decayed: int) -> float:
        return self.base_lr * self.factor ** (num_decayed - self.first)


@dataclass(frozen=True)
class LRRange:
    """What a range test found.

    Attributes:
        rates, losses: of each update whose loss was finite.
        smoothed: the losses, each averaged with its neighbours.
        diverged: whether the loss exploded before the end.
    """

    rates: list[float]
    losses: list[float]
    diverged: bool

    @property
    def smoothed(self) -> list[float]:
        reach = max(1, len(self.losses) // 20)
        return [
            float(np.mean(self.losses[max(0, place - reach) : place + reach + 1])) for place in range(len(self.losses))
        ]

    @property
    def lowest(self) -> int:
        """Place of the lowest smoothed loss."""
        return int(np.argmin(self.smoothed))

    @property
    def steepest(self) -> int | None:
        """Place where the smoothed loss falls most for the same ratio of rates; None if it never falls."""
        smoothed, end = self.smoothed, self.lowest + 1
        if end < 3 or smoothed[0] - smoothed[end - 1] < FALL * abs(smoothed[0]):
            return None
        return int(np.argmin(np.gradient(smoothed[:end], np.log(self.rates[:end]))))

    @property
    def suggestion(self) -> float | None:
        """A peak rate for a run: that of the steepest fall, or a tenth of that of the lowest loss if it is smaller."""
        return None if self.steepest is None else min(self.rates[self.steepest], self.rates[self.lowest] / 10)


def range_config(config: TrainConfig) -> TrainConfig:
    """The configuration of a run's range test: in a folder of its own, without validation, checkpoints and schedule.

    Nothing of it goes to the run's TensorBoard or Weights & Biases, and no moving average is kept.

    It begins with the weights of --restore-from or --finetune-from, with new ones otherwise.
    """
    options = config.lr_range
    return dataclasses.replace(
        config,
        lr_scheduler=Chosen(LR_SCHEDULERS.get("constant"), LRSchedulerConfig()),
        dataloader=dataclasses.replace(config.dataloader, valid_subset=None),
        training=dataclasses.replace(
            config.training, max_update=options.lr_range_updates, max_epoch=None, stop_time_hours=None
        ),
        checkpoint=dataclasses.replace(
            config.checkpoint,
            save_dir=str(Path(config.checkpoint.save_dir) / FOLDER),
            save=False,
            restore_from=None,
            finetune_from=config.checkpoint.finetune_from or config.checkpoint.restore_from,
        ),
        ema=dataclasses.replace(config.ema, ema_decay=0.0),
        report=dataclasses.replace(config.report, report=False, tensorboard_dir=None, wandb_project=None),
    )


def lr_range_test(trainer: Trainer) -> LRRange:
    """Take the updates of a range test.

    Args:
        trainer: new, of a `range_config`; its weights are of no use afterwards.

    Returns:
        Rates and losses up to the end, or until the loss explodes: not finite, four times the lowest or one and a half
        times the first (each the average of a few updates).

    Raises:
        UserError: the training split gives no batch, or the first losses are not finite.
    """
    options = trainer.config.lr_range
    first = trainer.state.num_updates
    sweep = Sweep(options, first)
    trainer.schedule = GroupSchedules(sweep)
    trainer.model.train()
    trainer.hooks.call("before_train", trainer)  # what other methods of a hook may rely on
    rates: list[float] = []
    losses: list[float] = []
    few = max(1, options.lr_range_updates // 20)
    lowest, begin, diverged = math.inf, math.inf, False
    try:
        for count, micro_batches in enumerate(_updates(trainer), start=1):
            trainer.train_step(micro_batches)
            loss = trainer.figures.record()["loss"]
            if not math.isfinite(loss):
                diverged = True
                break
            rates.append(sweep.lr(first + count - 1))
            losses.append(loss)
            recent = float(np.mean(losses[-few:]))
            begin = recent if count <= few else begin
            lowest = min(lowest, recent)
            diverged = count > few and (recent > 4 * lowest or recent > 1.5 * begin)
            if count % few == 0:
                logger.info("update %d of %d: lr %.2e, loss %.4f", count, options.lr_range_updates, rates[-1], recent)
            if diverged or count == options.lr_range_updates:
                break
    finally:
        trainer.output.close()
        trainer.checkpoints.release()
    if len(losses) < 3:
        raise UserError(
            f"--lr-range-test: the loss was not finite after {counted(len(losses), 'update')}; lower --lr-range-start"
        )
    return LRRange(rates, losses, diverged)


def write_range(found: LRRange, folder: Path) -> list[Path]:
    """Write the figures, `lr_range.json`, and the curve, `lr_range.svg`; returns both paths."""
    figures, curve = folder / "lr_range.json", folder / "lr_range.svg"
    values = {"lr": found.rates, "loss": found.losses, "smoothed": found.smoothed, "diverged": found.diverged}
    write_whole(figures, json.dumps({**values, "suggestion": found.suggestion}) + "\n")
    marks = [("lowest loss", found.rates[found.lowest])]
    if found.steepest is not None and found.suggestion is not None:
        marks += [("steepest fall", found.rates[found.steepest]), ("suggestion", found.suggestion)]
    write_whole(curve, chart(found.rates, found.losses, found.smoothed, marks))
    return [figures, curve]


def describe_range(found: LRRange, files: list[Path]) -> str:
    """A table of the test, what follows from it, and where to find more."""
    smoothed = found.smoothed
    lines = [f"{'learning rate':>13}  {'loss':>10}  {'smoothed':>10}"]
    places = np.unique(np.linspace(0, len(found.rates) - 1, min(ROWS, len(found.rates))).round().astype(int))
    lines += [f"{found.rates[p]:>13.2e}  {found.losses[p]:>10.4f}  {smoothed[p]:>10.4f}" for p in places]
    return "\n".join([*lines, *_conclusion(found), f"written to {' and '.join(map(str, files))}"])


def _conclusion(found: LRRange) -> Iterator[str]:
    if found.diverged:
        yield f"the loss explodes after {found.rates[-1]:.2e}"
    if found.steepest is None or found.suggestion is None:
        yield "the loss does not fall: no rate can be suggested; try a larger --lr-range-end or more updates"
        return
    lowest = found.rates[found.lowest]
    yield f"lowest loss    at {lowest:.2e}; there it is about to grow, a tenth is a usual choice: {lowest / 10:.2e}"
    yield f"steepest fall  at {found.rates[found.steepest]:.2e}; there an update gains most"
    yield f"suggestion     --lr {found.suggestion:.1e} (the smaller of the two, as the peak of a schedule with warm-up)"
    if not found.diverged:
        yield "the loss has not exploded by the last rate; a larger --lr-range-end shows more"


def _updates(trainer: Trainer) -> Iterator[list[Batch]]:
    """The micro-batches of updates, epoch after epoch."""
    while True:
        if trainer.train_iterator.batches_left() == 0:
            raise UserError(
                f"split {trainer.config.dataloader.train_subset!r} gives no batch; is --max-tokens too small?"
            )
        yield from dataloading.in_groups(trainer.train_iterator.batches(), trainer.config.training.update_freq)
