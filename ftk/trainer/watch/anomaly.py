"""`detect_anomaly`: finds the first module with a non-finite output, or gradient of an input."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ftk.batch import Batch
from ftk.model_parallel.shards import canonical_name, local
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.step import Update, seed_update, unwrapped

logger = logging.getLogger(__name__)

_FORWARD, _BACKWARD, _SUMMED = range(3)  # kinds of findings, the most precise first


class DetectAnomaly(Hook):
    """Repeats the passes of a skipped update and names the first module that produced NaN or infinity.

    A skipped update does not change the parameters, and its number seeds its random numbers, so the second pass
    computes the same values. Its gradients are dropped and the run continues. All ranks skip the same updates and
    search at the same time.
    """

    def __init__(self, update: Update) -> None:
        self._update = update
        self._micro_batches: list[Batch] = []

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        self._micro_batches = micro_batches

    def after_step(self, step: StepInfo) -> None:
        if not bool(step.skip):
            return
        with step.stopwatch.aside():
            number = step.num_updates
            found = find_anomalies(self._update, self._micro_batches, number - 1, step.num_targets)
        if not found and self._update.scaler is None:  # with a scaler, the scaled gradients overflowed
            found = [
                "a second pass over the same batches was finite: the norm of the gradients overflows, or results "
                "differ between two runs of the same step (non-deterministic operators, faulty hardware)"
            ]
        for text in found:
            logger.warning("anomaly in update %d, epoch %d: %s", number, step.epoch, text)


def find_anomalies(update: Update, micro_batches: list[Batch], num_updates: int, num_targets: float) -> list[str]:
    """Repeat the passes of an update without a loss scale, and check every module; all ranks call it.

    Args:
        update: of the run; its parameters keep their values and lose their gradients.
        micro_batches: this rank's CPU batches.
        num_updates: updates done before the checked one.
        num_targets: summed over all ranks.

    Returns:
        The most precise findings of all ranks, the same on every rank.
    """
    world = update.world
    search = _Search()
    search.check_values(update.model, micro_batches)
    seed_update(update.config.common.seed, num_updates, world.data_rank, world.pipeline_rank)
    update.optimizer.zero_grad(set_to_none=True)
    # Compiled code does not call the hooks of its modules.
    compiled = update.config.engine.compile_on(update.device) != "none"
    eager = torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()
    try:
        scale = torch.full((), 1.0 / (num_targets or 1), device=update.device)
        with search.watching(update.runner.stages), eager:
            unwrapped(update.runner).forward_backward(micro_batches, scale)
        search.check_gradients(update.model)
    finally:
        update.optimizer.zero_grad(set_to_none=True)
    gathered = world.gather_json([world.data_rank, *search.result(), world.rank])
    findings = [found for found in gathered if found[2] is not None]
    best = min((kind for _, kind, *_ in findings), default=_SUMMED)
    first: dict[int, str] = {}  # data rank -> finding; its tensor parallel ranks have the same one
    for data_rank, kind, text, rank in findings:
        if kind == best:
            first.setdefault(data_rank, f"rank {rank}, {text}" if world.size > 1 else text)
    return [first[data_rank] for data_rank in sorted(first)]


class _Search:
    """Records the first non-finite tensor of this rank.

    In the forward pass, that is an output of a module, or an input that is computed between modules; in the backward
    pass, the gradient of an input of a module, if those of its outputs were finite.

    -inf in an output may be a mask and does not count.
    """

    def __init__(self) -> None:
        self._found: str | None = None
        self._received: str | None = None  # a non-finite gradient of an output, computed outside this rank's modules
        self._kind = _SUMMED

    def result(self) -> tuple[int, str | None]:
        """The kind of the finding, and its text."""
        return self._kind, self._found or self._received

    def check_values(self, model: nn.Module, micro_batches: Sequence[Batch]) -> None:
        for name, parameter in model.named_parameters():
            if _is_bad(parameter):
                self._note(f"the parameter {canonical_name(name, model)} itself has {_count(parameter)}")
        for batch in micro_batches:
            values = {**batch.inputs, "targets": batch.targets, "weights": batch.weights, **batch.extras}
            for name, value in values.items():
                if isinstance(value, Tensor) and _is_bad(value):
                    self._note(f"the batch itself: {name!r} has {_count(value)}")

    def check_gradients(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not _is_finite(parameter.grad):
                text = f"the gradient of the parameter {canonical_name(name, model)} has {_count(parameter.grad)}"
                self._note(f"in the backward pass: {text}", _SUMMED)

    @contextlib.contextmanager
    def watching(self, stages: Sequence[nn.Module]) -> Iterator[None]:
        """In this block the stages and all of their modules have hooks."""
        handles = []
        try:
            for stage in stages:
                handles.append(stage.register_forward_hook(self._after_stage))
                model: Any = stage.model
                for name, module in model.named_modules():
                    name = canonical_name(name, model) or "the model"
                    handles.append(module.register_forward_pre_hook(functools.partial(self._before, name)))
                    handles.append(module.register_forward_hook(functools.partial(self._after, name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, name: str, module: nn.Module, given: Any) -> None:
        for value in _tensors(given):
            if not is_recomputing() and _is_bad(value):
                self._note(f"in the forward pass: the input of {name} has {_count(value)}")

    def _after(self, name: str, module: nn.Module, given: Any, keywords: Any, output: Any) -> None:
        if is_recomputing():
            return
        inputs, outputs = list(_tensors((given, keywords))), list(_tensors(output))
        for value in outputs:
            if _is_bad(value):
                text = f"the output of {name} ({type(module).__name__}) has {_count(value)}"
                self._note(f"in the forward pass: {text}; its input: {'; '.join(map(_range, inputs[:3]))}")
        given_finite: list[bool] = []  # of each gradient of an output so far

        def of_output(gradient: Tensor) -> None:
            given_finite.append(_is_finite(gradient))
            if not given_finite[-1] and self._found is None and self._received is None:
                self._received = f"in the backward pass: the gradient of the output of {name} has {_count(gradient)}"

        def of_input(gradient: Tensor) -> None:
            if given_finite and all(given_finite) and not _is_finite(gradient):
                text = f"in the backward pass of {name} ({type(module).__name__}): the gradient of its input has "
                self._note(text + _count(gradient), _BACKWARD)

        # The hooks of children are registered first, so the innermost module is the first to see a gradient.
        for values, hook in ((outputs, of_output), (inputs, of_input)):
            for value in values:
                if value.requires_grad:
                    value.register_hook(hook)

    def _after_stage(self, stage: nn.Module, given: Any, output: Any) -> None:
        loss = getattr(output, "loss", None)  # only the last stage of a pipeline has one
        if loss is not None and not _is_finite(loss):
            self._note(f"in the forward pass: the loss is {loss.item():g}")

    def _note(self, text: str, kind: int = _FORWARD) -> None:
        if self._found is None and (kind < _SUMMED or self._received is None):
            self._found, self._kind = text, kind


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in a module's arguments or in what it returns."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list | dict):
        for item in values.values() if isinstance(values, dict) else values:
            yield from _tensors(item)


def _numbers(value: Tensor) -> Tensor:
    """This rank's values of a tensor; of a sparse gradient the stored ones."""
    with torch.no_grad():
        value = local(value.detach())
        return value.coalesce().values() if value.is_sparse else value


def _is_finite(value: Tensor) -> bool:
    return bool(_numbers(value).isfinite().all())


def _is_bad(value: Tensor) -> bool:
    """Whether a tensor holds NaN or +inf."""
    numbers = _numbers(value)
    return value.is_floating_point() and bool((numbers.isnan() | numbers.isposinf()).any())


def _count(value: Tensor) -> str:
    """Such as "2 NaN, 1 -inf of 96 numbers"."""
    numbers = _numbers(value)
    counts = {"NaN": numbers.isnan(), "inf": numbers.isposinf(), "-inf": numbers.isneginf()}
    shown = [f"{int(which.sum())} {name}" for name, which in counts.items() if which.any()]
    return f"{', '.join(shown)} of {numbers.numel()} numbers"


def _range(value: Tensor) -> str:
    """Such as "-0.5 to 3", for the finite numbers."""
    numbers = _numbers(value).double()
    numbers = numbers[numbers.isfinite()]
    return f"{numbers.min().item():g} to {numbers.max().item():g}" if numbers.numel() else "nothing finite"


def is_recomputing() -> bool:
    """Whether activation checkpointing recomputes a module in the backward pass."""
    return torch._C._current_graph_task_id() != -1
