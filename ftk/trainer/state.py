"""The state of a run besides tensors: all that a restarted process needs to continue."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from ftk.checkpoint import BrokenCheckpoint, checkpoint_name


@dataclass
class Best:
    """The best validation so far."""

    metric: str
    value: float
    num_updates: int


@dataclass
class TrainerState:
    """What `trainer.json` holds.

    Attributes:
        num_updates: updates done, skipped ones included.
        iterator: state of the training iterator after the last update.
        best: the best validation so far.
        validations_without_best: validations since then, for patience.
        validation_pending: whether the run was interrupted before the validation that is due after the last update.
        scores: checkpoint's name -> its validation metric.
        seconds: training time of the run, restarts included.
        figures: sums since the last training record, and skipped updates.
        lr_scheduler: state of the schedule.
        loss_scale: state of the loss scaler, empty without one.
        seed: of the run, for the record.
        tokenizer: fingerprint of the tokenizer with which the run was started.
        data: identifies the training documents (`ftk.trainer.resume.data_identity`).
        data_processes: number of data-parallel ranks.
    """

    num_updates: int = 0
    iterator: dict[str, Any] = field(default_factory=dict)
    best: Best | None = None
    validations_without_best: int = 0
    validation_pending: bool = False
    scores: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    lr_scheduler: dict[str, Any] = field(default_factory=dict)
    loss_scale: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    tokenizer: str | None = None
    data: str | None = None
    data_processes: int = 1

    def reset(self, what: set[str]) -> None:
        """Empty parts of the state: "lr_scheduler", "dataloader", "meters", or "scores" of another run."""
        if "lr_scheduler" in what:
            self.lr_scheduler = {}
        if "dataloader" in what:
            self.iterator = {}
        if "meters" in what or "scores" in what:
            self.scores, self.best, self.validations_without_best = {}, None, 0
        if "meters" in what:
            self.figures = {}

    def rank(self, metric: str, value: float, maximize: bool) -> bool:
        """Record a validation. Returns whether it is the new best.

        Args:
            metric: name of the figure; if it differs from that of the best one, this validation is the best.
            value: NaN is never the best.
            maximize: whether larger is better.
        """
        if not math.isnan(value):
            self.scores[checkpoint_name(self.num_updates)] = value
        sign = -1.0 if maximize else 1.0
        best = self.best
        is_better = best is None or best.metric != metric or sign * value < sign * best.value
        if math.isnan(value) or not is_better:
            self.validations_without_best += 1
            return False
        self.best = Best(metric, value, self.num_updates)
        self.validations_without_best = 0
        return True

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def is_in(cls, values: dict[str, Any]) -> bool:
        """Whether the values of a checkpoint's `trainer.json` are the state of a run."""
        names = {f.name for f in dataclasses.fields(cls)} - {"num_updates", "tokenizer"}
        return "converted_from" not in values and not names.isdisjoint(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any], where: object) -> TrainerState:
        """The inverse of `to_dict`.

        Raises:
            BrokenCheckpoint: a field is unknown or missing, as in checkpoints of other versions of ftk.
        """
        names = {f.name for f in dataclasses.fields(cls)}
        if set(values) != names:
            odd = ", ".join(sorted(set(values) ^ names))
            raise BrokenCheckpoint(f"{where}: trainer.json is of another version of ftk (fields that differ: {odd})")
        best = values["best"]
        if values["num_updates"] is None or (best is not None and "num_updates" not in best):
            raise BrokenCheckpoint(f"{where}: trainer.json has no number of updates")
        return cls(**{**values, "best": Best(**best) if best is not None else None})
