"""Places in the training loop where other code can look in or act, without a change to the Trainer."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ftk.batch import Batch
from ftk.config.choice import choice
from ftk.errors import UserError
from ftk.registry import HOOKS
from ftk.trainer.log.records import Record

if TYPE_CHECKING:
    from ftk.trainer.log.summary import Summary
    from ftk.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class Hook:
    """Called by the Trainer at these places, in this order; each method does nothing unless it is overridden.

    A hook may read and change what the trainer offers: `model`, `optimizer`, `state`, `epoch`, `device`, `config`,
    `checkpoints.folder`; after a step `gradients.sums` and `skip` (whether the update was skipped), on the device. One
    that is called on every update must not ask the device for a value (`.item()`, `if tensor:`), or the step waits
    for it. What it raises ends the run as any failure does. Of several processes (`world`) each calls its own hooks.

        @register_hook("print_norms")
        class PrintNorms(Hook):
            def on_record(self, trainer, record): ...

    and `ftk-train ... --hooks print_norms`. With `@register_hook(name, config=Options)` the class is built as
    `PrintNorms(options)` from `--hooks 'print_norms interval=10'`.
    """

    def before_train(self, trainer: Trainer) -> None:
        """Everything is built and loaded."""

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        """An update begins; the batches are on the CPU."""

    def after_backward(self, trainer: Trainer) -> None:
        """The gradients of the whole update are there, unscaled; they are not yet clipped."""

    def after_step(self, trainer: Trainer) -> None:
        """The update is done and counted in `trainer.state.num_updates`."""

    def on_record(self, trainer: Trainer, record: Record) -> None:
        """A training or validation record is written; keys that are added go with it."""

    def after_epoch(self, trainer: Trainer) -> None:
        """The last update of epoch `trainer.epoch` is done."""

    def before_validation(self, trainer: Trainer) -> None:
        """The validation splits are about to be gone through."""

    def after_validation(self, trainer: Trainer, results: dict[str, Record]) -> None:
        """They have been: split -> figures. Figures that are added can rank checkpoints (--best-metric).

        Of several processes those of the main one count.
        """

    def before_checkpoint(self, trainer: Trainer) -> None:
        """A checkpoint of the present state is about to be written."""

    def after_checkpoint(self, trainer: Trainer, folder: Path) -> None:
        """It was taken: the state may change again. A background save may still be writing the folder."""

    def after_train(self, trainer: Trainer, summary: Summary) -> None:
        """The run has ended by itself or by a signal, not by a failure."""


class Hooks:
    """Hooks called one after the other."""

    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks

    def __iter__(self) -> Iterator[Hook]:
        return iter(self._hooks)

    def call(self, place: str, *arguments: object) -> None:
        """Calls the method named `place` of each hook. Which hook of others' code fails is said, beside its error."""
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
