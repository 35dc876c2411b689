"""`--inspect-interval N`: parameters, gradients, changes and activations in numbers, every so many updates."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ftk.errors import UserError
from ftk.model_parallel.naming import canonical_name
from ftk.optim.patterns import matches
from ftk.tasks.base import Batch
from ftk.trainer.hooks import Hook
from ftk.trainer.records import RecordFile

if TYPE_CHECKING:
    from ftk.trainer.summary import Summary
    from ftk.trainer.trainer import Trainer

logger = logging.getLogger(__name__)

FILE = "inspect.jsonl"
WEIGHT = ("norm", "mean", "std", "min", "max")
GRADIENT = ("grad_norm", "grad_mean", "grad_std", "grad_min", "grad_max")
ACTIVATION = ("mean", "std", "min", "max")
Figures = dict[str, float | None]  # None: there is no gradient
_COLUMNS = ("norm", "mean", "std", "min", "max", "grad_norm", "grad_mean", "grad_std", "update_ratio")


class Inspection(Hook):
    """Shows what is in the model at every `interval`-th update, and changes nothing.

    The figures are taken of the weights before the update, of the whole update's gradients before they are clipped,
    of the change (`update_ratio`: norm of the change over norm of the weights) and of what modules return, all
    micro-batches together. They go into the log as a table and into `inspect.jsonl`. Only in these updates there
    are hooks in the model, a copy of the chosen parameters, and a wait for the device.

    Args:
        interval: updates from one to the next.
        patterns: of names of parameters and modules; none: all.
        model: bare; its compiled parts are not looked into.
        compiled: whether all of it is compiled.

    Raises:
        UserError: a pattern matches neither a parameter nor a module.
    """

    def __init__(self, interval: int, patterns: Sequence[str], model: nn.Module, *, compiled: bool = False) -> None:
        self.interval = interval
        parameters = {canonical_name(name, model): value for name, value in model.named_parameters() if value.numel()}
        modules = {canonical_name(name, model): module for name, module in model.named_modules() if name}
        for pattern in patterns:
            _require_match(pattern, [*parameters, *modules])
        self.parameters = {name: value for name, value in parameters.items() if _is_chosen(name, patterns)}
        chosen = {name: module for name, module in modules.items() if _is_chosen(name, patterns)}
        # A hook in a compiled module would have it compiled anew, and computed otherwise.
        opaque = set(modules.values()) if compiled else set(_inside_compiled(model))
        self.modules = {name: module for name, module in chosen.items() if module not in opaque}
        if len(self.modules) < len(chosen):
            logger.info("--inspect-interval: what modules return inside of compiled code is not shown")
        self._file: RecordFile | None = None
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}  # name -> [5], as GRADIENT
        self._outputs: dict[str, list[tuple[int, Tensor]]] = {}  # name -> (numbers, [4] as ACTIVATION) of each call

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        if (trainer.state.num_updates + 1) % self.interval:
            return
        if self._file is None:  # its records of updates that are now taken again are cut off
            self._file = RecordFile(trainer.checkpoints.folder / FILE, trainer.state.num_updates)
        self._before = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._outputs = {}
        for name, module in self.modules.items():
            self._handles.append(module.register_forward_hook(self._watch(name)))

    def after_backward(self, trainer: Trainer) -> None:
        if not self._before and not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._gradients = {name: _figures(grad) for name, grad in grads.items() if grad is not None}

    def after_step(self, trainer: Trainer) -> None:
        if not self._before and not self._outputs:
            return
        with trainer.stopwatch.aside(), trainer.stopwatch.part("log"):
            parameters, modules = self._read()
            self._before, self._gradients, self._outputs = {}, {}, {}
            num_updates = trainer.state.num_updates
            head = {"event": "inspect", "num_updates": num_updates, "epoch": trainer.epoch}
            assert self._file is not None
            self._file.write({**head, "parameters": _plain(parameters), "modules": _plain(modules)})
            shapes = {name: "x".join(map(str, parameter.shape)) for name, parameter in self.parameters.items()}
            logger.info("update %d\n%s", num_updates, "\n".join(_tables(parameters, modules, shapes)))

    def after_train(self, trainer: Trainer, summary: Summary) -> None:
        if self._file is not None:
            self._file.close()

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # in a backward pass: activation checkpointing computes again
                return
            tensor = next(_floating(output), None)
            if tensor is not None and tensor.numel():
                self._outputs.setdefault(name, []).append((tensor.numel(), _figures(tensor)[1:]))

        return hook

    def _read(self) -> tuple[dict[str, Figures], dict[str, Figures]]:
        """Name -> figures of parameters and of modules; the one wait for the device."""
        rows: dict[str, Tensor] = {}  # name -> [11]
        for name, old in self._before.items():
            change = (self.parameters[name].detach() - old).float().norm()
            grad = self._gradients.get(name)
            grad = torch.full((len(GRADIENT),), math.nan, device=old.device) if grad is None else grad
            rows[name] = torch.cat([_figures(old), grad, change[None]])
        calls = [figures for calls in self._outputs.values() for _, figures in calls]
        parameter_values = torch.stack(list(rows.values())).tolist() if rows else []
        call_values = iter(torch.stack(calls).tolist() if calls else [])
        parameters: dict[str, Figures] = {}
        for name, values in zip(rows, parameter_values, strict=True):
            named: Figures = dict(zip((*WEIGHT, *GRADIENT), values, strict=False))
            named["update_ratio"] = values[-1] / values[0] if values[0] else math.nan
            if name not in self._gradients:
                named |= dict.fromkeys(GRADIENT)
            parameters[name] = named
        modules = {}
        for name, of_calls in self._outputs.items():
            modules[name] = _pooled([(numel, next(call_values)) for numel, _ in of_calls])
        return parameters, modules


def _figures(tensor: Tensor) -> Tensor:
    """Norm, mean, standard deviation (of all numbers there are, not an estimate), smallest and largest: float32 [5]."""
    with torch.no_grad():
        values = tensor.detach().float()
        std, mean = torch.std_mean(values, correction=0)
        return torch.stack([values.norm(), mean, std, values.min(), values.max()])


def _pooled(calls: list[tuple[int, list[float]]]) -> Figures:
    """The figures of several calls' numbers taken together."""
    total = sum(numel for numel, _ in calls)
    mean = sum(numel * values[0] for numel, values in calls) / total
    square = sum(numel * (values[1] ** 2 + values[0] ** 2) for numel, values in calls) / total
    variance = square - mean**2
    std = math.sqrt(max(0.0, variance)) if math.isfinite(variance) else math.nan
    low, high = min(values[2] for _, values in calls), max(values[3] for _, values in calls)
    if any(math.isnan(value) for _, values in calls for value in values):
        low = high = math.nan
    return dict(zip(ACTIVATION, (mean, std, low, high), strict=True))


def _plain(rows: dict[str, Figures]) -> dict[str, Figures]:
    """As JSON has it: null for what is not finite."""
    return {
        name: {key: value if value is not None and math.isfinite(value) else None for key, value in row.items()}
        for name, row in rows.items()
    }


def _floating(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors of what a module returns."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for item in output:
            yield from _floating(item)
    elif isinstance(output, dict):
        for item in output.values():
            yield from _floating(item)


def _inside_compiled(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            yield from module.modules()


def _is_chosen(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(matches(name, pattern) for pattern in patterns)


def _require_match(pattern: str, names: list[str]) -> None:
    if not any(matches(name, pattern) for name in names):
        close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
        hint = f"; close to it: {', '.join(close)}" if close else ""
        raise UserError(f"--inspect {pattern!r} matches no parameter and no module{hint}")


def _tables(parameters: dict[str, Figures], modules: dict[str, Figures], shapes: dict[str, str]) -> Iterator[str]:
    if parameters:
        yield from _table("parameter", {f"{name} {shapes[name]}": row for name, row in parameters.items()}, _COLUMNS)
    if modules:
        yield from _table("output of", modules, ACTIVATION)


def _table(title: str, rows: dict[str, Figures], columns: Sequence[str]) -> Iterator[str]:
    width = max(len(title), *(len(name) for name in rows))
    yield f"{title:<{width}}" + "".join(f" {column.replace('update_ratio', 'update/w'):>10}" for column in columns)
    for name, row in rows.items():
        yield f"{name:<{width}}" + "".join(f" {_short(row[column]):>10}" for column in columns)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
