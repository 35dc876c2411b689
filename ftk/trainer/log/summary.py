"""The summary at the end of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ftk.checkpoint import BEST, LAST, checkpoint_name
from ftk.errors import counted
from ftk.terminal import duration
from ftk.trainer.signals import PREEMPTIONS
from ftk.trainer.state import Best


@dataclass(frozen=True)
class Summary:
    """How a call of `Trainer.train` ended.

    Attributes:
        num_updates: updates done in the run.
        seconds: time of the run, validation, saving and restarts included.
        best: the best validation.
        reason: why it stopped, e.g. "max_update 2000 is reached".
        signal: name of the signal that stopped it early, None if none did.
        folder: of the run.
        saved: whether it has checkpoints.
        save_failure: why the last state could not be saved, None if it was.
        skipped_updates: updates that were skipped for a non-finite loss or gradient.
        loss: at the last validation, nats per target token; None without one.
        loss_name: its name in the record, `nll_loss` where the criterion's loss is another.
        unigram_loss: the same of the unigram baseline; None where it means nothing.
        warmup_updates: of the schedule.
        generates: whether the model can be asked for text.
        evaluation: that which asks the model as its task did, where it was not for texts that are written.
        data, user_dir: for the command that comes next; `data` of an evaluation is a file.
    """

    num_updates: int
    epoch: int
    seconds: float
    best: Best | None
    reason: str
    signal: str | None
    folder: Path
    saved: bool
    save_failure: str | None
    skipped_updates: int
    loss: float | None = None
    loss_name: str = "loss"
    unigram_loss: float | None = None
    warmup_updates: int = 0
    generates: bool = False
    evaluation: str | None = None
    data: str = "DATA"
    user_dir: str | None = None

    @property
    def exit_code(self) -> int:
        """0 for a saved run that reached a limit or was preempted; 1 after Ctrl-C, or if the end is not saved."""
        if self.save_failure is not None:
            return 1
        return 0 if self.signal is None or self.signal in PREEMPTIONS else 1

    @property
    def warning(self) -> str | None:
        """A warning that the last state is not saved, and what the command then does; None if it is saved."""
        if self.save_failure is None:
            return None
        then = f"continues from {(self.folder / LAST).resolve().name}" if self.saved else "starts from the beginning"
        return f"the end of this run is not saved: {self.save_failure}; once that is mended, the same command {then}"

    def lines(self) -> Iterator[str]:
        done = f"{counted(self.num_updates, 'update')}, epoch {self.epoch}"
        took = f"{done}, {duration(self.seconds)} with validation and saving"
        yield f"stopped: {self.reason} ({took})"
        if self.skipped_updates:
            yield f"{counted(self.skipped_updates, 'skipped update')} (loss or gradient infinite or not a number)"
        if self.best is not None:
            best = self.best
            there = (self.folder / checkpoint_name(best.num_updates)).exists()
            where = f"at update {best.num_updates}{'' if there else ', which has no checkpoint'}"
            yield f"best validation {best.metric}: {best.value:.4f} {where}"
        if self.signal is None and not self._beats_unigram:
            yield (
                f"validation {self.loss_name} {self.loss:.4f} is no better than the unigram baseline "
                f"{self.unigram_loss:.4f}, which knows nothing but how often tokens occur"
            )
        if self.saved:
            names = [name for name in (LAST, BEST) if (self.folder / name).exists()]
            yield f"checkpoints: {self.folder} ({', '.join(names)})"
            if self.signal is not None and self.save_failure is None:
                yield "the same command continues this run"
            elif self.save_failure is None:
                yield f"next: {self._next()}"

    @property
    def _beats_unigram(self) -> bool:
        return self.loss is None or self.unigram_loss is None or self.loss < self.unigram_loss

    def _next(self) -> str:
        """What to do now: with the model if it has learned something, and to that end otherwise."""
        if 2 * self.skipped_updates > self.num_updates:
            return "a lower `lr` or longer `warmup_updates`, in another `save_dir`: most updates were skipped"
        if not self._beats_unigram and self.num_updates < self.warmup_updates:
            return "a larger `max_update` or fewer `warmup_updates`: the learning rate was still rising"
        if not self._beats_unigram:
            return "a larger `max_update`, or in another `save_dir` another `lr` (`lr_range_test` finds one)"
        plugin = "" if self.user_dir is None else f" --user-dir {shlex.quote(self.user_dir)}"
        folder = shlex.quote(str(self.folder))
        if self.evaluation is not None:
            return (
                f"ftk-evaluate --path {folder} --evaluation {self.evaluation} --data {shlex.quote(self.data)}{plugin}"
            )
        if self.generates:
            return f"ftk-interactive --path {folder}{plugin}"
        return f"ftk-validate {shlex.quote(self.data)} --path {folder}{plugin}"
