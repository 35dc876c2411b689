"""Hooks: code that the Trainer calls at fixed places of the training loop."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.config.choice import choice
from ftk.errors import UserError
from ftk.model_parallel.world import World
from ftk.registry import HOOKS, is_plugin, named
from ftk.trainer.config import TrainConfig
from ftk.trainer.log.metrics import Stopwatch
from ftk.trainer.log.records import Record
from ftk.trainer.log.summary import Summary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInfo:
    """The argument of hooks: parts of the run that they may use, and its progress.

    Attributes:
        config: of the run.
        model: this rank's part of it, with the parameter names of the whole model.
        optimizer: of its trained parameters.
        world: the ranks of the run, each of which calls its own hooks.
        folder: of the run.
        stopwatch: time spent inside `with step.stopwatch.aside():` does not count as training.
        num_updates: updates done, skipped ones included; during an update those before it.
        epoch: of the last update.
        lr: learning rate of the last update.
        sums: of the last update, name -> (0-d sum, 0-d count) on the device, of this rank's batches: "loss" (not on all
            stages of a pipeline), the criterion's meters, and after the update "gnorm".
        num_tokens, num_targets: of the last update, on all ranks; padding counts as tokens.
        skip: whether the last update was skipped, 0-d bool on the device; None before the first.
    """

    config: TrainConfig
    model: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    folder: Path
    stopwatch: Stopwatch
    num_updates: int = 0
    epoch: int = 1
    lr: float = 0.0
    sums: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    num_tokens: int = 0
    num_targets: float = 0
    skip: Tensor | None = None

    @property
    def device(self) -> torch.device:
        return self.world.device


class Hook:
    """Called by the Trainer at these places, in this order; each method does nothing unless it is overridden.

    A hook may read and change `step.model`, its gradients and the state of `step.optimizer`. One that is called on
    every update must not read a value from the device (`.item()`, `if tensor:`), or each update waits for the device.
    An exception in a hook ends the run like any other failure.

        @register_hook("print_norms")
        class PrintNorms(Hook):
            def on_record(self, step, record): ...

    and `ftk-train ... --hooks print_norms`. With `@register_hook(name, config=Options)` the class is built as
    `PrintNorms(options)` from `--hooks 'print_norms interval=10'`.
    """

    added_figures: Sequence[str] = ()
    """Names of the figures that `after_validation` adds to the first split; `best_metric` may be one of them."""

    def before_train(self, step: StepInfo) -> None:
        """Everything is built and loaded."""

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        """Before an update; the batches are on the CPU."""

    def after_backward(self, step: StepInfo) -> None:
        """After the backward passes of an update; gradients are unscaled and not yet clipped."""

    def after_step(self, step: StepInfo) -> None:
        """After an update, which `step.num_updates` now counts."""

    def on_record(self, step: StepInfo, record: Record) -> None:
        """Before a training or validation record is written; a hook may add keys to it."""

    def after_epoch(self, step: StepInfo) -> None:
        """After the last update of epoch `step.epoch`."""

    def before_validation(self, step: StepInfo) -> None:
        """Before a validation."""

    def after_validation(self, step: StepInfo, results: dict[str, Record]) -> None:
        """After a validation, with split -> figures. A hook may add figures, also for `best_metric`.

        On several ranks those of the main rank count.
        """

    def before_checkpoint(self, step: StepInfo) -> None:
        """Before a checkpoint of the current state is saved."""

    def after_checkpoint(self, step: StepInfo, folder: Path) -> None:
        """After the state was copied for a checkpoint; a background save may still be writing the folder."""

    def after_train(self, step: StepInfo, summary: Summary) -> None:
        """After the run has reached a limit or received a signal; not after a failure."""


class Hooks:
    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def call(self, place: str, *arguments: object) -> None:
        """Call the method named `place` of each hook; if a plugin's hook fails, an error in the log names it."""
        for hook in self._hooks:
            try:
                getattr(hook, place)(*arguments)
            except UserError:
                raise
            except Exception:
                if is_plugin(hook):
                    kind = type(hook)
                    logger.error("the hook %s (%s) failed in %s", kind.__qualname__, kind.__module__, place)
                raise

    def added_figures(self) -> list[str]:
        """Of all hooks."""
        return [name for hook in self for name in hook.added_figures]

    def may_add_figures(self) -> bool:
        """Whether a plugin's hook overrides `after_validation`, and so may add figures."""
        return any(is_plugin(hook) and type(hook).after_validation is not Hook.after_validation for hook in self)

    def refuse_no_batches(self) -> NoReturn:
        """Raises UserError: a hook has removed all batches of an update; names those that may have."""
        found = [named(hook) for hook in self if is_plugin(hook) and type(hook).before_step is not Hook.before_step]
        raise UserError(f"{' or '.join(found)}: before_step has emptied the list of batches; it must leave one or more")


def build_hooks(lines: list[str]) -> list[Hook]:
    """The hooks that `hooks` names, e.g. ["print_norms interval=10"].

    Raises:
        UserError: an unknown name or option; a plugin's hook with a method of such a name that is never called.
    """
    hooks = [choice(line, HOOKS, "`hooks`").build() for line in lines]
    for kind in map(type, hooks):
        for name in dir(kind):
            near = difflib.get_close_matches(name, _PLACES, 1, 0.85)
            if near and callable(getattr(kind, name)) and not hasattr(Hook, name):
                raise UserError(
                    f"{named(kind)}: {name} is never called; did you mean {near[0]}? Else give it another name"
                )
    return hooks


_PLACES = [name for name in vars(Hook) if name.startswith(("before_", "after_", "on_"))]
