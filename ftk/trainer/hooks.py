"""Places in the training loop where other code can look in or act, without a change to the Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.config.choice import choice
from ftk.errors import UserError
from ftk.model_parallel.world import World
from ftk.registry import HOOKS
from ftk.trainer.config import TrainConfig
from ftk.trainer.log.metrics import Stopwatch
from ftk.trainer.log.records import Record
from ftk.trainer.log.summary import Summary

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepInfo:
    """What a hook is shown: the parts that it may use, and where the run stands.

    Attributes:
        config: of the run.
        model: this rank's part of it, under the names of the whole one.
        optimizer: of its trained parameters.
        world: the ranks of the run, each of which calls its own hooks.
        folder: of the run.
        stopwatch: time spent inside `with step.stopwatch.aside():` does not count as training.
        num_updates: updates done, skipped ones included; during an update those before it.
        epoch: of the last update.
        lr: learning rate of the last update.
        sums: of the last update, name -> (0-d sum, 0-d count) on the device, of this rank's batches: "loss" (a stage of
            a pipeline may have none), the criterion's meters, and once it is done "gnorm".
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

    A hook may read and change `step.model` and its gradients and the state of `step.optimizer`. One that is called on
    every update must not ask the device for a value (`.item()`, `if tensor:`), or the step waits for it. An exception
    that it raises ends the run as any failure does.

        @register_hook("print_norms")
        class PrintNorms(Hook):
            def on_record(self, step, record): ...

    and `ftk-train ... --hooks print_norms`. With `@register_hook(name, config=Options)` the class is built as
    `PrintNorms(options)` from `--hooks 'print_norms interval=10'`.
    """

    def before_train(self, step: StepInfo) -> None:
        """Everything is built and loaded."""

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        """An update begins; the batches are on the CPU."""

    def after_backward(self, step: StepInfo) -> None:
        """The gradients of the whole update are there, unscaled; they are not yet clipped."""

    def after_step(self, step: StepInfo) -> None:
        """The update is done and counted in `step.num_updates`."""

    def on_record(self, step: StepInfo, record: Record) -> None:
        """A training or validation record is written; keys that are added go with it."""

    def after_epoch(self, step: StepInfo) -> None:
        """The last update of epoch `step.epoch` is done."""

    def before_validation(self, step: StepInfo) -> None:
        """The validation splits are about to be gone through."""

    def after_validation(self, step: StepInfo, results: dict[str, Record]) -> None:
        """They have been: split -> figures. Figures that are added can rank checkpoints (--best-metric).

        On several ranks those of the main one count.
        """

    def before_checkpoint(self, step: StepInfo) -> None:
        """A checkpoint of the present state is about to be written."""

    def after_checkpoint(self, step: StepInfo, folder: Path) -> None:
        """It was taken: the state may change again. A background save may still be writing the folder."""

    def after_train(self, step: StepInfo, summary: Summary) -> None:
        """The run has ended by itself or by a signal, not by a failure."""


class Hooks:
    """Hooks called one after the other."""

    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def call(self, place: str, *arguments: object) -> None:
        """Calls the method named `place` of each hook; a failing hook of a plugin is named in the log."""
        for hook in self._hooks:
            try:
                getattr(hook, place)(*arguments)
            except UserError:
                raise
            except Exception:
                if _is_of_others(hook):
                    kind = type(hook)
                    logger.error("the hook %s (%s) failed in %s", kind.__qualname__, kind.__module__, place)
                raise

    def may_add_figures(self) -> bool:
        """Whether there is code of others that a validation's figures are shown to, which may add some."""
        return any(_is_of_others(hook) and type(hook).after_validation is not Hook.after_validation for hook in self)


def _is_of_others(hook: Hook) -> bool:
    return type(hook).__module__.partition(".")[0] != "ftk"


def build_hooks(lines: list[str]) -> list[Hook]:
    """The hooks that `--hooks` names, e.g. ["print_norms interval=10"].

    Raises:
        UserError: an unknown name or option.
    """
    return [choice(line, HOOKS, "--hooks").build() for line in lines]
