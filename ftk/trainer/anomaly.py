"""`--detect-anomaly`: which module first made something that is not finite, in the forward or the backward pass."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ftk.data.iterator import SAMPLE_IDS
from ftk.model_parallel.naming import canonical_name
from ftk.optim.clip import gradient_norm
from ftk.tasks.base import Batch
from ftk.trainer.device import autocast, to_device
from ftk.trainer.hooks import Hook
from ftk.trainer.seeding import seed_update
from ftk.trainer.step import Update

if TYPE_CHECKING:
    from ftk.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class DetectAnomaly(Hook):
    """Takes the passes of a skipped update again, and says what first was not finite.

    A skipped update has left the parameters as they were, and its random numbers are fixed by its number, so the
    second pass computes the same as the first; its gradients are thrown away. Then the run goes on as without.
    """

    def __init__(self) -> None:
        self._micro_batches: list[Batch] = []

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        self._micro_batches = micro_batches

    def after_step(self, trainer: Trainer) -> None:
        if not bool(trainer.skip):
            return
        with trainer.stopwatch.aside():
            number = trainer.state.num_updates
            found = find_anomaly(trainer.update, self._micro_batches, number - 1)
        # Of several processes one may have been enough.
        if found is None and trainer.update.scaler is None and trainer.world.size == 1:
            found = "a second pass over the same batches gave finite numbers; is something random, or the hardware ill?"
        for rank, theirs in enumerate(trainer.world.gather_json(found)):
            if theirs is not None:
                where = f"process {rank}, " if trainer.world.size > 1 else ""
                logger.warning("anomaly in update %d, epoch %d: %s%s", number, trainer.epoch, where, theirs)


def find_anomaly(update: Update, micro_batches: list[Batch], num_updates: int) -> str | None:
    """Go forward and backward as an update did, and look at each module's inputs, outputs and gradients.

    The loss is not scaled: an overflow of fp16 gradients that the loss scale alone has made is none. Waits for the
    device at each module. The parameters keep their values and lose their gradients.

    Args:
        update: of the run.
        micro_batches: CPU batches.
        num_updates: updates done before that one.

    Returns:
        What was found, for a person to read; None if everything is finite.
    """
    for name, parameter in update.model.named_parameters():
        if _is_bad(parameter):
            return f"the parameter {canonical_name(name, update.model)} itself has {_count(parameter)}"
    num_targets = max(1, sum(update.task.count_targets(batch) for batch in micro_batches))
    seed_update(update.config.common.seed, num_updates, update.world.data_rank, update.world.pipeline_rank)
    update.optimizer.zero_grad(set_to_none=True)
    try:
        for number, batch in enumerate(micro_batches, start=1):
            search = _Search(update.model, batch, update.task.count_targets(batch))
            with search.watching(), _uncompiled(update.config.engine.compile):
                batch = to_device(batch, update.device)
                search.look_at_batch(batch)
                with autocast(update.device, update.config.training.precision):
                    loss = update.task.train_step(update.model, update.criterion, batch).loss
                search.look_at_loss(loss, type(update.criterion).__name__)
                if search.found is None and loss.requires_grad:
                    (loss / num_targets).backward()
            if search.found is not None:
                place = f"in micro-batch {number} of {len(micro_batches)}, " if len(micro_batches) > 1 else ""
                return place + search.found
        return _too_large(update)
    finally:
        update.optimizer.zero_grad(set_to_none=True)


def _too_large(update: Update) -> str | None:
    """What to say if the gradients of all micro-batches are finite one by one."""
    grads = {name: parameter.grad for name, parameter in update.model.named_parameters() if parameter.grad is not None}
    for name, grad in grads.items():
        if not _is_finite(grad):
            return f"the sum of the micro-batches' gradients of {canonical_name(name, update.model)} has {_count(grad)}"
    if grads and not _is_finite(gradient_norm(update.parameters)):
        name, grad = max(grads.items(), key=lambda item: item[1].abs().max().item())
        largest = f"the largest is that of {canonical_name(name, update.model)}, {_range(grad)}"
        return f"each gradient is finite, but not their norm; {largest}"
    return None


class _Search:
    """Looks at one forward and backward pass.

    Forward, modules are hooked: the first output that is not finite names its module, or an input that already is not
    names the code before it. Backward, every node of the autograd graph is hooked and belongs to the module in whose
    forward it was made: the first that is given finite gradients and returns others is the one. -inf in an
    output may be a mask: it is only named where NaN or +inf follow nowhere.
    """

    def __init__(self, model: nn.Module, batch: Batch, num_targets: int) -> None:
        self.found: str | None = None
        self._model = model
        self._modules = {module: canonical_name(name, model) for name, module in model.named_modules()}
        self._parameters = {parameter: canonical_name(name, model) for name, parameter in model.named_parameters()}
        self._sample_ids: Tensor | None = batch.get(SAMPLE_IDS)
        # [N, V] of the N positions with loss is not to be taken for [B, ...]
        self._sample_axes = 3 if self._sample_ids is not None and num_targets == len(self._sample_ids) else 2
        self._open: list[str] = []  # modules whose forward we are in, the innermost last
        self._last: str | None = None  # the module that was finished last
        self._minus_infinity: str | None = None  # the first output with -inf
        self._owners: dict[Node, str] = {}
        self._forward = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks are in the model inside of it."""
        handles: list[RemovableHandle] = []
        try:
            for module in self._modules:
                handles.append(module.register_forward_pre_hook(self._before_module, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after_module, with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._owners.clear()

    def look_at_batch(self, batch: Batch) -> None:
        for name, value in batch.items():
            if isinstance(value, Tensor) and _is_bad(value):
                self.found = f"the batch itself: {name!r} has {_count(value)}{self._rows(value)}"
                return

    def look_at_loss(self, loss: Tensor, criterion: str) -> None:
        """The forward pass has ended: what no module has made belongs to the loss."""
        self._forward = False
        if self.found is None and not _is_finite(loss):
            self.found = self._minus_infinity
        if self.found is None and not _is_finite(loss):
            self.found = f"in the forward pass: the loss ({criterion}) is {loss.item():g}{self._after_last()}"
        self._claim([loss], f"the loss ({criterion})")

    def _before_module(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if not self._forward:  # activation checkpointing computes again
            return
        parent, name = self._open[-1] if self._open else "", self._modules[module]
        inputs = list(_tensors((arguments, keywords)))
        self._claim(inputs, _shown(parent))
        bad = next((value for value in inputs if _is_bad(value)), None)
        if self.found is None and bad is not None:
            self.found = (
                f"in the forward pass, in the code of {_shown(parent)}{self._after_last()}: what goes into "
                f"{_shown(name)} has {_count(bad)}{self._rows(bad)}"
            )
        self._open.append(name)

    def _after_module(self, module: nn.Module, arguments: Any, keywords: dict[str, Any], output: Any) -> None:
        if not self._forward:
            return
        name = self._open.pop() if self._open else self._modules[module]
        outputs = list(_tensors(output))
        self._claim(outputs, _shown(name))
        if self.found is None:
            inputs = list(_tensors((arguments, keywords)))
            for value in outputs:
                if not _is_finite(value):
                    found = (
                        f"in the forward pass: the output of {_shown(name)} ({type(module).__name__}) has "
                        f"{_count(value)}{self._rows(value)}; its input: {_ranges(inputs)}"
                    )
                    if _is_bad(value):
                        self.found = found
                        break
                    self._minus_infinity = self._minus_infinity or found
        self._last = name

    def _after_last(self) -> str:
        return f" after {_shown(self._last)}" if self._last is not None else ""

    def _rows(self, value: Tensor) -> str:
        """In which samples, where the tensor has a row for each."""
        ids = self._sample_ids
        if ids is None or value.ndim < self._sample_axes or len(value) != len(ids):
            return ""
        bad = (~value.detach().isfinite()).flatten(1).any(1).cpu()
        return f", of {len(ids)} samples in {', '.join(map(str, ids[bad][:32].tolist()))}"

    # -- backward -------------------------------------------------------------------------------------------

    def _claim(self, tensors: list[Tensor], owner: str) -> None:
        """The nodes that lead to these tensors and belong to nobody yet are the owner's."""
        waiting = [value.grad_fn for value in tensors if value.grad_fn is not None]
        while waiting:
            node = waiting.pop()
            if node in self._owners or hasattr(node, "variable"):  # a leaf stays in its parameter, with hooks
                continue
            self._owners[node] = owner
            node.register_hook(self._watch_node(node.name(), owner, [after for after, _ in node.next_functions]))
            waiting += [after for after, _ in node.next_functions if after is not None]

    def _watch_node(self, operation: str, owner: str, nexts: list[Node | None]) -> Callable[..., None]:
        def hook(made: Any, given: Any) -> None:
            if self.found is not None:
                return
            made, given = ([_values(grad) for grad in grads] for grads in (made, given))
            bad = next((place for place, grad in enumerate(made) if grad is not None and not _is_finite(grad)), None)
            if bad is None:
                return
            sources = [grad for grad in given if grad is not None]
            if any(not _is_finite(grad) for grad in sources):
                what = f"the sum of the gradients that come to {owner} ({operation}) has"
                self.found = f"in the backward pass: {what} {_count(sources[0])}"
                return
            target = self._name_of(nexts[bad]) if bad < len(nexts) else None
            what = f"{target or 'its input'} has {_count(made[bad])}"
            rows = "" if target else self._rows(made[bad])
            self.found = (
                f"in the backward pass of {owner} ({operation}): the gradient of {what}{rows}; "
                f"the gradient that it was given: {_ranges(sources)}"
            )

        return hook

    def _name_of(self, node: Node | None) -> str | None:
        """The parameter whose leaf a node is, or leads to by itself (transposed, in another precision)."""
        for _ in range(4):
            if node is None:
                return None
            variable = getattr(node, "variable", None)
            if variable is not None:
                return self._parameters.get(variable)
            if len(node.next_functions) != 1:
                return None
            node = node.next_functions[0][0]
        return None


def _uncompiled(mode: str) -> contextlib.AbstractContextManager[Any]:
    """Compiled code calls no hooks of the modules that it was made of."""
    return contextlib.nullcontext() if mode == "none" else torch.compiler.set_stance("force_eager")


def _shown(name: str) -> str:
    return name or "the model"


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in arguments or in what a module returns."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for item in values:
            yield from _tensors(item)
    elif isinstance(values, dict):
        for item in values.values():
            yield from _tensors(item)


def _values(gradient: Tensor | None) -> Tensor | None:
    """A gradient whose numbers can be looked at: of a sparse one those that there are."""
    return gradient.coalesce().values() if gradient is not None and gradient.is_sparse else gradient


def _is_finite(value: Tensor) -> bool:
    return not value.is_floating_point() or bool(value.detach().isfinite().all())


def _is_bad(value: Tensor) -> bool:
    """Whether there is NaN or +inf in it; -inf is common in masks."""
    return not _is_finite(value) and bool((value.detach().isnan() | value.detach().isposinf()).any())


def _count(value: Tensor) -> str:
    value = value.detach()
    counts = {"NaN": int(value.isnan().sum()), "inf": int(value.isposinf().sum()), "-inf": int(value.isneginf().sum())}
    return f"{', '.join(f'{count} {name}' for name, count in counts.items() if count)} of {value.numel()} numbers"


def _range(value: Tensor) -> str:
    if not value.numel():
        return "no number"
    if value.dtype == torch.bool:
        return "bool"
    finite = value.detach()[value.detach().isfinite()] if value.is_floating_point() else value
    return f"{finite.min().item():g} to {finite.max().item():g}" if finite.numel() else "nothing finite"


def _ranges(values: list[Tensor]) -> str:
    return "; ".join(_range(value) for value in values[:3]) or "no tensor"
