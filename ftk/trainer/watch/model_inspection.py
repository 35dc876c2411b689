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

from ftk.batch import Batch
from ftk.errors import UserError
from ftk.model_parallel.gradients import UNCOUNTED
from ftk.model_parallel.norms import square_sums
from ftk.model_parallel.shards import canonical_name, local, shard_groups
from ftk.model_parallel.world import World
from ftk.optim.patterns import matches
from ftk.trainer.hooks import Hook
from ftk.trainer.log.records import RecordFile
from ftk.trainer.watch.finite import tensors_in

if TYPE_CHECKING:
    from ftk.trainer.log.summary import Summary
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

    Each of several processes looks at its part of the model and at its batches; the main one puts together what all
    have seen, and writes.

    Args:
        interval: updates from one to the next.
        patterns: of names of parameters and modules; none: all.
        model: bare, this process's part of it; its compiled parts are not looked into.
        compiled: whether all of it is compiled.
        world: the processes, each of which builds this; None: this one alone.

    Raises:
        UserError: a pattern matches neither a parameter nor a module of any process.
    """

    def __init__(
        self,
        interval: int,
        patterns: Sequence[str],
        model: nn.Module,
        *,
        compiled: bool = False,
        world: World | None = None,
    ) -> None:
        self.interval = interval
        self.world = world or World.single()
        named = {canonical_name(name, model): value for name, value in model.named_parameters() if value.numel()}
        modules = {canonical_name(name, model): module for name, module in model.named_modules() if name}
        known = [*named, *modules]
        if self.world.sizes.pipeline > 1:
            known = list(dict.fromkeys(name for names in self.world.gather_json(known) for name in names))
        for pattern in patterns:
            _require_match(pattern, known)
        uncounted: set[str] = getattr(model, UNCOUNTED, set())  # another stage has them, too
        self.parameters = {
            name: value
            for name, value in named.items()
            if _is_chosen(name, patterns) and name not in uncounted and self._tells_of(value)
        }
        chosen = {name: module for name, module in modules.items() if _is_chosen(name, patterns)}
        # A hook in a compiled module would have it compiled anew, and computed otherwise.
        opaque = set(modules.values()) if compiled else set(_inside_compiled(model))
        self.modules = {name: module for name, module in chosen.items() if module not in opaque}
        if len(self.modules) < len(chosen):
            logger.info("--inspect-interval: what modules return inside of compiled code is not shown")
        self._file: RecordFile | None = None
        self._looks = False
        self._handles: list[RemovableHandle] = []
        self._passes: dict[nn.Module, int] = {}  # forward passes of each stage in this update
        self._expected = 0  # of each
        self._counts = True  # whether the present pass is one of them
        self._before: dict[str, Tensor] = {}  # this process's parts
        self._gradients: dict[str, Tensor] = {}  # name -> [5], as GRADIENT
        self._outputs: dict[str, list[tuple[int, Tensor]]] = {}  # name -> (numbers, [4] as ACTIVATION) of each call

    def before_step(self, trainer: Trainer, micro_batches: list[Batch]) -> None:
        self._looks = (trainer.state.num_updates + 1) % self.interval == 0
        if not self._looks:
            return
        if self._file is None and self.world.is_main:  # its records of updates that are now taken again are cut off
            self._file = RecordFile(trainer.checkpoints.folder / FILE, trainer.state.num_updates)
        with torch.no_grad():
            self._before = {name: local(value.detach()).clone() for name, value in self.parameters.items()}
        self._outputs, self._passes, self._expected = {}, {}, len(micro_batches)
        for stage in trainer.runner.stages:
            self._handles.append(stage.register_forward_pre_hook(self._begin_pass))
        for name, module in self.modules.items():
            self._handles.append(module.register_forward_hook(self._watch(name)))

    def after_backward(self, trainer: Trainer) -> None:
        if not self._looks:
            return
        for handle in self._handles:
            handle.remove()
        self._handles = []
        grads = {name: parameter.grad for name, parameter in self.parameters.items()}
        self._gradients = {name: _figures(grad) for name, grad in grads.items() if grad is not None}

    def after_step(self, trainer: Trainer) -> None:
        if not self._looks:
            return
        with trainer.stopwatch.aside(), trainer.stopwatch.part("log"):
            seen = self.world.gather_json(self._read())
            self._before, self._gradients, self._outputs = {}, {}, {}
            if not self.world.is_main:
                return
            parameters = {name: _whole_parameter(rows) for name, rows in _by_name(seen, "parameters").items()}
            modules = {name: _pooled(rows, ACTIVATION) for name, rows in _by_name(seen, "modules").items()}
            num_updates = trainer.state.num_updates
            head = {"event": "inspect", "num_updates": num_updates, "epoch": trainer.epoch}
            assert self._file is not None
            self._file.write({**head, "parameters": _plain(parameters), "modules": _plain(modules)})
            shapes = {name: shape for each in seen for name, shape in each["shapes"].items()}
            logger.info("update %d\n%s", num_updates, "\n".join(_tables(parameters, modules, shapes)))

    def after_train(self, trainer: Trainer, summary: Summary) -> None:
        if self._file is not None:
            self._file.close()

    def _begin_pass(self, stage: nn.Module, arguments: Any) -> None:
        self._passes[stage] = self._passes.get(stage, 0) + 1
        self._counts = self._passes[stage] <= self._expected  # a pipeline fills a short update up

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # in a backward pass: activation checkpointing computes again
                return
            if not self._counts:
                return
            tensor = next((tensor for tensor in tensors_in(output) if tensor.is_floating_point()), None)
            if tensor is not None and (own := local(tensor.detach())).numel():
                self._outputs.setdefault(name, []).append((own.numel(), _figures(own)[1:]))

        return hook

    def _read(self) -> dict[str, Any]:
        """What this process has to say, as JSON has it; waits for the device.

        "parameters": name -> (numbers, [11] as WEIGHT, GRADIENT and the norm of the change, whether there is a
        gradient) of this process's parts; "modules": name -> (numbers, [4]) of each call;
        "shapes": of whole parameters.
        """
        own = [name for name, part in self._before.items() if part.numel()]
        rows = []
        with torch.no_grad():
            for name in own:
                old = self._before[name]
                change = square_sums([(local(self.parameters[name].detach()) - old).float()]).sqrt().float()
                grad = self._gradients.get(name)
                grad = torch.full((len(GRADIENT),), math.nan, device=old.device) if grad is None else grad
                rows.append(torch.cat([_figures(old), grad, change]))
        values = torch.stack(rows).tolist() if rows else []
        calls = [figures for calls in self._outputs.values() for _, figures in calls]
        call_values = iter(torch.stack(calls).tolist() if calls else [])
        return {
            "parameters": {
                name: [(self._before[name].numel(), figures, name in self._gradients)]
                for name, figures in zip(own, values, strict=True)
            },
            "modules": {
                name: [(numel, next(call_values)) for numel, _ in of_calls] for name, of_calls in self._outputs.items()
            },
            "shapes": {name: "x".join(map(str, self.parameters[name].shape)) for name in own},
        }

    def _tells_of(self, parameter: Tensor) -> bool:
        """Whether this process is the one that tells of its part: others may have the same."""
        cut = shard_groups(parameter)
        return all(self.world.coordinate(name) == 0 for name in ("replicate", "shard", "tensor") if name not in cut)


def _by_name(seen: Sequence[dict[str, Any]], kind: str) -> dict[str, list[Any]]:
    """Name -> what all processes have seen under it."""
    rows: dict[str, list[Any]] = {}
    for each in seen:
        for name, of_name in each[kind].items():
            rows.setdefault(name, []).extend(of_name)
    return rows


def _whole_parameter(parts: Sequence[tuple[int, list[float], bool]]) -> Figures:
    """The figures of a parameter from those of its parts."""
    weights = [(numel, values[: len(WEIGHT)]) for numel, values, _ in parts]
    named = _pooled(weights, WEIGHT)
    if all(has_grad for _, _, has_grad in parts):
        grads = [(numel, values[len(WEIGHT) : -1]) for numel, values, _ in parts]
        named |= dict(zip(GRADIENT, _pooled(grads, WEIGHT).values(), strict=True))
    else:
        named |= dict.fromkeys(GRADIENT)
    norm, change = named["norm"], _root_of_squares([values[-1] for _, values, _ in parts])
    named["update_ratio"] = change / norm if norm else math.nan
    return named


def _figures(tensor: Tensor) -> Tensor:
    """Norm, mean, standard deviation (of all numbers there are, not an estimate), smallest and largest: float32 [5].

    Of what this process has of a tensor; zeros where that is nothing.
    """
    with torch.no_grad():
        values = local(tensor.detach()).float()
        if not values.numel():
            return values.new_zeros(5)
        std, mean = torch.std_mean(values, correction=0)
        norm = square_sums([values])[0].sqrt().float()
        return torch.stack([norm, mean, std, values.min(), values.max()])


def _pooled(parts: Sequence[tuple[int, Sequence[float]]], names: Sequence[str]) -> Figures:
    """The figures of the numbers of several parts taken together.

    Args:
        parts: how many numbers each has, and its figures.
        names: of the figures, mean, std, min and max the last of them.
    """
    if len(parts) == 1:
        return dict(zip(names, parts[0][1], strict=True))
    total = sum(numel for numel, _ in parts)
    *norms, means, stds, lows, highs = zip(*(figures for _, figures in parts), strict=True)
    counts = [numel for numel, _ in parts]
    mean = sum(numel * value for numel, value in zip(counts, means, strict=True)) / total
    squares = (numel * (std**2 + (value - mean) ** 2) for numel, std, value in zip(counts, stds, means, strict=True))
    variance = sum(squares) / total
    std = math.sqrt(variance) if math.isfinite(variance) else math.nan
    low, high = min(lows), max(highs)
    if any(math.isnan(value) for _, figures in parts for value in figures):
        low = high = math.nan
    return dict(zip(names, (*map(_root_of_squares, norms), mean, std, low, high), strict=True))


def _root_of_squares(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values))


def _plain(rows: dict[str, Figures]) -> dict[str, Figures]:
    """As JSON has it: null for what is not finite."""
    return {
        name: {key: value if value is not None and math.isfinite(value) else None for key, value in row.items()}
        for name, row in rows.items()
    }


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
