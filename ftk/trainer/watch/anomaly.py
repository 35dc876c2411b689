"""`--detect-anomaly`: which module first made something that is not finite, in the forward or the backward pass."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ftk.batch import Batch
from ftk.model_parallel.gradients import finish_gradients
from ftk.model_parallel.shards import canonical_name, is_distributed, local
from ftk.model_parallel.world import World
from ftk.trainer.hooks import Hook
from ftk.trainer.runner import without_copies
from ftk.trainer.seeding import seed_update
from ftk.trainer.step import Update
from ftk.trainer.watch.finite import (
    count_non_finite,
    is_bad,
    is_finite,
    number_range,
    number_ranges,
    own_numbers,
    tensors_in,
    values_of_gradient,
)

if TYPE_CHECKING:
    from ftk.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


class DetectAnomaly(Hook):
    """Takes the passes of a skipped update again, and says what first was not finite.

    A skipped update has left the parameters as they were, and its random numbers are fixed by its number, so the
    second pass computes the same as the first; its gradients are thrown away. Then the run goes on as without.
    All processes of a run skip the same updates, and search together.
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
            found = find_anomalies(trainer.update, self._micro_batches, number - 1, trainer.gradients.num_targets)
        several = trainer.world.size > 1
        told = [f"process {anomaly.rank}, {anomaly.text}" if several else anomaly.text for anomaly in found]
        if not told and trainer.update.scaler is None:
            told = [
                "a second pass over the same batches gave finite numbers; is something random, or the hardware ill?"
            ]
        for text in told:
            logger.warning("anomaly in update %d, epoch %d: %s", number, trainer.epoch, text)


class Anomaly(NamedTuple):
    """What a process has seen. Of those that have the same batches, the smallest was there first.

    Attributes:
        micro_batch: in which it was, from 1; 0: in what was there before the pass.
        backward: whether it was on the way back.
        stage: of the pipeline; on the way back counted from its end.
        event: modules and nodes that this process had come by.
        rank: of the process.
        text: for a person to read.
    """

    micro_batch: int
    backward: bool
    stage: int
    event: int
    rank: int
    text: str


def find_anomalies(update: Update, micro_batches: list[Batch], num_updates: int, num_targets: float) -> list[Anomaly]:
    """Go forward and backward as an update did, and look at each module's inputs, outputs and gradients.

    The loss is not scaled: an overflow of fp16 gradients that the loss scale alone has made is none. Waits for the
    device at each module. The parameters keep their values and lose their gradients. All processes have to call it.

    Args:
        update: of the run.
        micro_batches: this process's CPU batches.
        num_updates: updates done before that one.
        num_targets: of all processes' batches together.

    Returns:
        What was first, of each data rank that has seen something; empty if everything is finite.
    """
    world = update.world
    if found := _first_of_all(_broken_parameter(update), world):
        return found[:1]  # copies are equal
    seed_update(update.config.common.seed, num_updates, world.data_rank, world.pipeline_rank)
    update.optimizer.zero_grad(set_to_none=True)
    try:
        scale = torch.full((), 1.0 / (num_targets or 1), device=update.device)
        watch = _Watch(update, micro_batches)
        with watch.watching(), _uncompiled(update.config.engine.compile):
            without_copies(update.runner).forward_backward(micro_batches, scale)
        if found := _first_of_all(watch.first(), world):
            return found
        finish_gradients(update.model)
        return _first_of_all(_too_large(update), world)[:1]
    finally:
        update.optimizer.zero_grad(set_to_none=True)


def _first_of_all(found: Anomaly | None, world: World) -> list[Anomaly]:
    """Of each data rank what was first there, from what each process has found; the same on every one."""
    first: dict[int, Anomaly] = {}
    for data_rank, told in world.gather_json([world.data_rank, found]):
        if told is not None:
            anomaly = Anomaly(*told)
            first[data_rank] = min(anomaly, first.get(data_rank, anomaly))
    return [first[data_rank] for data_rank in sorted(first)]


def _broken_parameter(update: Update) -> Anomaly | None:
    for name, parameter in update.model.named_parameters():
        if is_bad(parameter):
            share = " of its share" if is_distributed(parameter) else ""
            text = f"the parameter {canonical_name(name, update.model)} itself has {count_non_finite(parameter)}{share}"
            return Anomaly(0, False, update.world.pipeline_rank, 0, update.world.rank, text)
    return None


def _too_large(update: Update) -> Anomaly | None:
    """What to say if the gradients of all micro-batches are finite one by one. All processes have to call it."""
    norm_is_finite = is_finite(update.gradients.norm())
    named = update.model.named_parameters()
    grads = {name: parameter.grad for name, parameter in named if parameter.grad is not None and parameter.grad.numel()}
    largest = 0.0
    text = None
    for name, grad in grads.items():
        name, grad = canonical_name(name, update.model), local(grad)
        if not is_finite(grad):
            text = f"the sum of the micro-batches' gradients of {name} has {count_non_finite(grad)}"
            return Anomaly(0, True, 0, 0, update.world.rank, text)
        if not norm_is_finite and grad.numel() and (size := grad.abs().max().item()) > largest:
            text = f"each gradient is finite, but not their norm; the largest is that of {name}, {number_range(grad)}"
            largest = size
    return None if text is None else Anomaly(0, True, 1, -round(largest), update.world.rank, text)


class _Watch:
    """Has a search look at each micro-batch that goes through this process, through the whole model or a stage of it.

    Args:
        update: of the run.
        micro_batches: CPU batches.
    """

    def __init__(self, update: Update, micro_batches: list[Batch]) -> None:
        self._update = update
        self._micro_batches = micro_batches
        self._searches: list[_Search] = []
        self._passes: dict[nn.Module, int] = {}  # forward passes of each stage

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks are in the model inside of it."""
        handles: list[RemovableHandle] = []
        names: dict[nn.Module, str] = {}  # a module without parameters may be in several stages
        try:
            for place, stage in enumerate(self._update.runner.stages):
                index = getattr(stage, "index", place)  # in a whole pipeline
                handles.append(stage.register_forward_pre_hook(self._begin(stage.model, index)))
                handles.append(stage.register_forward_hook(self._end))
                names |= {module: canonical_name(name, stage.model) for name, module in stage.model.named_modules()}
            for module, name in names.items():
                handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                handles.append(module.register_forward_hook(self._after(name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for search in self._searches:
                search.forget_graph()

    def first(self) -> Anomaly | None:
        """What was found first in this process."""
        return min((search.found for search in self._searches if search.found is not None), default=None)

    def _begin(self, model: nn.Module, index: int) -> Callable[..., None]:
        def hook(stage: nn.Module, arguments: Any) -> None:
            number = self._passes[stage] = self._passes.get(stage, 0) + 1
            count = len(self._micro_batches)
            batch = self._micro_batches[number - 1 if number <= count else 0]  # a pipeline fills a short update up
            self._searches.append(_Search(self._update, model, batch, (number, count), index))

        return hook

    def _end(self, stage: nn.Module, arguments: Any, output: Any) -> None:
        self._searches[-1].look_at_result(output)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any) -> None:
            if not _goes_backward():
                self._searches[-1].before_module(name, module, (arguments, keywords))

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, keywords: Any, output: Any) -> None:
            if not _goes_backward():
                self._searches[-1].after_module(name, module, (arguments, keywords), output)

        return hook


class _Search:
    """Looks at one forward and backward pass.

    Forward, modules are hooked: the first output that is not finite names its module, or an input that already is not
    names the code before it. Backward, every node of the autograd graph is hooked and belongs to the module in whose
    forward it was made: the first that is given finite gradients and returns others is the one. -inf in an
    output may be a mask: it is only named where NaN or +inf follow nowhere.

    Args:
        update: of the run.
        model: what this process holds of it, or a stage of that.
        batch: on the CPU.
        place: which micro-batch it is, from 1, and of how many.
        stage: of a pipeline.
    """

    def __init__(self, update: Update, model: nn.Module, batch: Batch, place: tuple[int, int], stage: int) -> None:
        self.found: Anomaly | None = None
        self._update = update
        self._place = place
        self._stage = stage
        self._parameters = {parameter: canonical_name(name, model) for name, parameter in model.named_parameters()}
        self._sample_ids = batch.sample_ids
        # [N, V] of the N positions with loss is not to be taken for [B, ...]
        self._sample_axes = 3 if self._sample_ids is not None and len(batch.places) == len(self._sample_ids) else 2
        self._events = 0
        self._open: list[str] = []  # modules whose forward we are in, the innermost last
        self._last: str | None = None  # the module that was finished last
        self._minus_infinity: str | None = None  # the first output with -inf
        self._owners: dict[Node, str] = {}
        self._look_at_batch(batch)

    def forget_graph(self) -> None:
        """The pass is done."""
        self._owners.clear()

    def _find(self, text: str, *, backward: bool = False) -> None:
        if self.found is None:
            number, count = self._place
            text = f"in micro-batch {number} of {count}, {text}" if count > 1 else text
            stage = -self._stage if backward else self._stage
            self.found = Anomaly(number, backward, stage, self._events, self._update.world.rank, text)

    def _look_at_batch(self, batch: Batch) -> None:
        own = {"targets": batch.targets, "weights": batch.weights}
        for name, value in {**batch.inputs, **own, **batch.extras}.items():
            if isinstance(value, Tensor) and is_bad(value):
                self._find(f"the batch itself: {name!r} has {count_non_finite(value)}{self._rows(value)}")
                return

    def look_at_result(self, output: Any) -> None:
        """The forward pass has ended: what no module has made belongs to the loss.

        Args:
            output: a `LossOutput`; of a stage of a pipeline what it hands on, or the loss.
        """
        value: Tensor = getattr(output, "loss", output)
        is_loss = value.ndim == 0
        owner = f"the loss ({type(self._update.criterion).__name__})" if is_loss else _shown("")
        if not is_finite(value):
            what = f"{owner} is {value.item():g}" if is_loss else f"what {owner} hands on has {count_non_finite(value)}"
            self._find(self._minus_infinity or f"in the forward pass: {what}{self._after_last()}")
        self._claim([value], owner)

    def before_module(self, name: str, module: nn.Module, given: Any) -> None:
        """A module's forward begins.

        Args:
            given: its arguments.
        """
        self._events += 1
        # Sharded parameters are others while they are whole.
        for own, parameter in module.named_parameters(recurse=False):
            self._parameters.setdefault(parameter, f"{name}.{own}" if name else own)
        parent = self._open[-1] if self._open else ""
        inputs = list(tensors_in(given))
        self._claim(inputs, _shown(parent))
        bad = next((value for value in inputs if is_bad(value)), None)
        if bad is not None:
            self._find(
                f"in the forward pass, in the code of {_shown(parent)}{self._after_last()}: what goes into "
                f"{_shown(name)} has {count_non_finite(bad)}{self._rows(bad)}"
            )
        self._open.append(name)

    def after_module(self, name: str, module: nn.Module, given: Any, output: Any) -> None:
        """It has ended.

        Args:
            given: its arguments.
            output: what it returned.
        """
        self._events += 1
        if self._open:
            self._open.pop()
        outputs = list(tensors_in(output))
        self._claim(outputs, _shown(name))
        if self.found is None:
            inputs = list(tensors_in(given))
            for value in outputs:
                if not is_finite(value):
                    found = (
                        f"in the forward pass: the output of {_shown(name)} ({type(module).__name__}) has "
                        f"{count_non_finite(value)}{self._rows(value)}; its input: {number_ranges(inputs)}"
                    )
                    if is_bad(value):
                        self._find(found)
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
        bad = (~own_numbers(value).isfinite()).flatten(1).any(1).cpu().numpy()
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
            self._events += 1
            if self.found is not None:
                return
            made, given = ([values_of_gradient(grad) for grad in grads] for grads in (made, given))
            bad = next((place for place, grad in enumerate(made) if grad is not None and not is_finite(grad)), None)
            if bad is None:
                return
            sources = [grad for grad in given if grad is not None]
            if any(not is_finite(grad) for grad in sources):
                what = f"the sum of the gradients that come to {owner} ({operation}) has"
                self._find(f"in the backward pass: {what} {count_non_finite(sources[0])}", backward=True)
                return
            target = self._name_of(nexts[bad]) if bad < len(nexts) else None
            what = f"{target or 'its input'} has {count_non_finite(made[bad])}"
            rows = "" if target else self._rows(made[bad])
            self._find(
                f"in the backward pass of {owner} ({operation}): the gradient of {what}{rows}; "
                f"the gradient that it was given: {number_ranges(sources)}",
                backward=True,
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


def _goes_backward() -> bool:
    """Whether a module is called in a backward pass: activation checkpointing computes it again."""
    return torch._C._current_graph_task_id() != -1


def _shown(name: str) -> str:
    return name or "the model"
