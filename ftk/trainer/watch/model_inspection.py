"""`inspect_interval` N: statistics of parameters, gradients, changes and activations, every N updates."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ftk.batch import Batch
from ftk.errors import UserError, did_you_mean
from ftk.model_parallel.shards import canonical_name, local, shard_groups
from ftk.model_parallel.world import World
from ftk.name_patterns import matches
from ftk.trainer.hooks import Hook, StepInfo
from ftk.trainer.log.records import RecordFile
from ftk.trainer.log.summary import Summary
from ftk.trainer.watch.anomaly import is_recomputing

logger = logging.getLogger(__name__)

FILE = "inspect.jsonl"
ACTIVATION = ("mean", "std", "min", "max")
COLUMNS = ("norm", "mean", "std", "min", "max", "grad_norm", "grad_mean", "grad_std", "update_ratio")
Figures = dict[str, float | None]  # None: there is no gradient, or the figure is not finite
Moments = list[float]  # count, mean, variance, smallest, largest


class Inspection(Hook):
    """Logs statistics of the model at every `interval`-th update, and changes no result.

    They are of the weights before the update, of the gradients before clipping, of the change (`update_ratio`: its norm
    over the norm of the weights), and of the first tensor that each module returns, over all micro-batches. They are
    logged as a table and written to `inspect.jsonl`. Only these updates run hooks in the model, copy the chosen
    parameters and wait for the device. Each rank inspects its part of the model and its batches; the main rank merges
    and writes.

    Args:
        interval: number of updates between two inspections.
        patterns: of names of parameters and modules; none: all.
        model: unwrapped, this rank's part of it; compiled parts are not inspected.
        compiled: whether all of it is compiled.
        world: the ranks, each of which builds this; None: this process alone.
        uncounted: names of parameters that another stage inspects.

    Raises:
        UserError: a pattern matches neither a parameter nor a module of any rank.
    """

    def __init__(
        self,
        interval: int,
        patterns: Sequence[str],
        model: nn.Module,
        *,
        compiled: bool = False,
        world: World | None = None,
        uncounted: Collection[str] = (),
    ) -> None:
        self.interval = interval
        self.world = world or World.single()
        named = {canonical_name(name, model): value for name, value in model.named_parameters() if value.numel()}
        modules = {canonical_name(name, model): module for name, module in model.named_modules() if name}
        known = list(dict.fromkeys(name for names in self.world.gather_json([*named, *modules]) for name in names))
        for pattern in patterns:
            if not any(matches(name, pattern) for name in known):
                raise UserError(f"`inspect` {pattern!r}: no such parameter or module; {did_you_mean(pattern, known)}")

        def is_chosen(name: str) -> bool:
            return not patterns or any(matches(name, pattern) for pattern in patterns)

        self.parameters = {
            name: value
            for name, value in named.items()
            if is_chosen(name) and name not in uncounted and self._reports(value)
        }
        # A hook in a compiled module would cause a recompilation with other numerics.
        whole = [module for module in modules.values() if compiled or getattr(module, "_compiled_call_impl", None)]
        opaque = {inner for module in whole for inner in module.modules()}
        self.modules = {name: module for name, module in modules.items() if is_chosen(name) and module not in opaque}
        if opaque:
            logger.info("`inspect_interval`: outputs of modules inside compiled code are not shown")
        self._file: RecordFile | None = None
        self._is_due = False
        self._handles: list[RemovableHandle] = []
        self._before: dict[str, Tensor] = {}  # this rank's parts
        self._gradients: dict[str, Tensor] = {}  # name -> [5], as Moments
        self._outputs: dict[str, list[Tensor]] = {}  # name -> [5] of each call

    def before_step(self, step: StepInfo, micro_batches: list[Batch]) -> None:
        self._is_due = (step.num_updates + 1) % self.interval == 0
        if not self._is_due:
            return
        if self._file is None and self.world.is_main:  # which removes records of later updates
            self._file = RecordFile(step.folder / FILE, step.num_updates)
        self._before = {name: local(value.detach()).clone() for name, value in self.parameters.items()}
        self._outputs = {}
        self._handles = [module.register_forward_hook(self._watch(name)) for name, module in self.modules.items()]

    def after_backward(self, step: StepInfo) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._is_due:
            grads = {name: parameter.grad for name, parameter in self.parameters.items()}
            self._gradients = {name: _moments(grad) for name, grad in grads.items() if grad is not None}

    def after_step(self, step: StepInfo) -> None:
        if not self._is_due:
            return
        with step.stopwatch.aside(), step.stopwatch.part("log"):
            seen = self.world.gather_json(self._read())
            self._before, self._gradients, self._outputs = {}, {}, {}
            if self._file is None:
                return
            parameters = {name: _parameter_figures(rows) for name, rows in _by_name(seen, "parameters").items()}
            modules = {name: _figures(sum(rows, []), ACTIVATION) for name, rows in _by_name(seen, "modules").items()}
            head = {"event": "inspect", "num_updates": step.num_updates, "epoch": step.epoch}
            self._file.write({**head, "parameters": parameters, "modules": modules})
            tables = [*_table("parameter", parameters, COLUMNS), *_table("output of", modules, ACTIVATION)]
            logger.info("update %d\n%s", step.num_updates, "\n".join(tables))

    def after_train(self, step: StepInfo, summary: Summary) -> None:
        if self._file is not None:
            self._file.close()

    def _watch(self, name: str) -> Any:
        def hook(module: nn.Module, arguments: Any, output: Any) -> None:
            if is_recomputing():
                return
            output = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(output, Tensor) and output.is_floating_point() and local(output.detach()).numel():
                self._outputs.setdefault(name, []).append(_moments(output))

        return hook

    def _read(self) -> dict[str, Any]:
        """The statistics of this rank as JSON values; waits for the device.

        "parameters": name -> Moments of this rank's part, of its change, and of its gradient if there is one;
        "modules": name -> Moments of each call.
        """
        rows: dict[str, list[Tensor]] = {}
        for name, old in self._before.items():
            if old.numel():
                change = local(self.parameters[name].detach()) - old
                gradient = [self._gradients[name]] if name in self._gradients else []
                rows[name] = [_moments(old), _moments(change), *gradient]
        read = {"parameters": rows, "modules": self._outputs}
        return {
            kind: {name: torch.stack(found).tolist() for name, found in of_kind.items()}
            for kind, of_kind in read.items()
        }

    def _reports(self, parameter: Tensor) -> bool:
        """Whether this rank reports its part: of ranks with the same part, the first does."""
        cut = shard_groups(parameter)
        return all(self.world.coordinate(name) == 0 for name in ("replicate", "shard", "tensor") if name not in cut)


def _by_name(seen: Sequence[dict[str, Any]], kind: str) -> dict[str, list[list[Moments]]]:
    """Name -> the statistics of each rank that has them."""
    rows: dict[str, list[list[Moments]]] = {}
    for of_rank in seen:
        for name, found in of_rank[kind].items():
            rows.setdefault(name, []).append(found)
    return rows


def _parameter_figures(parts: Sequence[list[Moments]]) -> Figures:
    """The figures of a parameter from the moments of its parts."""
    figures = _figures([part[0] for part in parts], COLUMNS[:5])
    norm, change = figures["norm"], _figures([part[1] for part in parts], ("norm",))["norm"]
    gradients = [part[2] for part in parts if len(part) > 2]
    of_gradient: Figures = _figures(gradients, COLUMNS[:5]) if gradients else dict.fromkeys(COLUMNS[:5])
    figures |= {f"grad_{name}": value for name, value in of_gradient.items()}
    return figures | {"update_ratio": change / norm if norm and change is not None else None}


def _moments(tensor: Tensor) -> Tensor:
    """`Moments` of this rank's part, not empty, of a tensor: float32 [5]."""
    with torch.no_grad():
        values = local(tensor.detach()).float()
        variance, mean = torch.var_mean(values, correction=0)
        return torch.stack([torch.full_like(mean, values.numel()), mean, variance, *values.aminmax()])


def _figures(parts: Sequence[Moments], names: Sequence[str]) -> Figures:
    """The named figures over all parts."""
    counts, means, variances, lows, highs = np.array(parts, dtype=np.float64).T
    total = counts.sum()
    with np.errstate(invalid="ignore", over="ignore"):
        mean = (counts * means).sum() / total
        variance = (counts * (variances + (means - mean) ** 2)).sum() / total
        found = {"norm": math.sqrt(total) * np.sqrt(variance + mean**2), "mean": mean, "std": np.sqrt(variance)}
    found |= {"min": lows.min(), "max": highs.max()}
    return {name: float(found[name]) if np.isfinite(found[name]) else None for name in names}


def _table(title: str, rows: dict[str, Figures], columns: Sequence[str]) -> Iterator[str]:
    if not rows:
        return
    width = max(len(title), *(len(name) for name in rows))
    yield f"{title:<{width}}" + "".join(f" {column.replace('update_ratio', 'update/w'):>10}" for column in columns)
    for name, row in rows.items():
        shown = ("-" if (value := row[column]) is None else f"{value:.3g}" for column in columns)
        yield f"{name:<{width}}" + "".join(f" {text:>10}" for text in shown)
