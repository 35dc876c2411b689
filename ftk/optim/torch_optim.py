"""AdamW and Adam of torch with options of ftk; and each class of `torch.optim` by its dotted name."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from ftk.config.options import option
from ftk.errors import UserError, did_you_mean
from ftk.model_parallel.shards import is_distributed
from ftk.optim.base import defaults_of
from ftk.optim.optimizers import AdamConfig, AdamWConfig
from ftk.registry import Entry


def adamw(config: AdamWConfig, param_groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), one fused kernel per group.

    Args:
        param_groups: as from `ftk.optim.parameter_groups`; a group's own `weight_decay` wins.
    """
    return torch.optim.AdamW(param_groups, **defaults_of(config), fused=True)


def adam(config: AdamConfig, param_groups: list[dict[str, Any]]) -> torch.optim.Adam:
    """Adam (Kingma and Ba 2015, https://arxiv.org/abs/1412.6980); arguments as of `adamw`.

    Weight decay is an L2 penalty and so passes through the running means; `adamw` decays the weights themselves.
    """
    return torch.optim.Adam(param_groups, **defaults_of(config), fused=True)


PREFIX = "torch.optim."
_REFUSED = {
    "LBFGS": "it computes the loss several times per step; use adamw",
    "Muon": "it takes matrices only; use muon, which has adamw for the others",
    "Rprop": "its steps do not follow the learning rate; use adamw",
    "SparseAdam": "it takes sparse gradients only, and those here are dense; use adamw",
}
_CANNOT_SHARD = {"Adafactor": "adafactor"}  # and what can: DTensor has not all that torch's needs
_FUSED = ("Adam", "AdamW")  # the kernels of SGD and Adagrad take no DTensor
_NO_OPTIONS = ("params", "foreach", "maximize", "capturable", "differentiable", "fused")  # decided here


@functools.cache
def entry(name: str) -> Entry:
    """What the registry has for a class of `torch.optim`: its options are the arguments of its constructor.

    Args:
        name: such as "torch.optim.RAdam".

    Raises:
        UserError: there is no such class, or ftk's training loop cannot use it; one line.
    """
    found = inspect.getmembers(torch.optim, inspect.isclass)
    classes: dict[str, Any] = {PREFIX + own: kind for own, kind in found if torch.optim.Optimizer in kind.__mro__[1:]}
    kind = classes.get(name)
    if kind is None:
        usable = [name for name in classes if name.removeprefix(PREFIX) not in _REFUSED]
        raise UserError(f"unknown optimizer {name!r}; {did_you_mean(name, usable)}")
    if kind.__name__ in _REFUSED:
        raise UserError(f"optimizer {name!r} cannot be used: {_REFUSED[kind.__name__]}")
    config = _config_of(kind)

    def build(config: Any, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        sharded = any(is_distributed(parameter) for group in param_groups for parameter in group["params"])
        if sharded and kind.__name__ in _CANNOT_SHARD:
            raise UserError(f"optimizer {name!r} cannot shard parameters; use {_CANNOT_SHARD[kind.__name__]}")
        try:
            made: torch.optim.Optimizer = kind(param_groups, **config.given())
            return made
        except ValueError as error:
            raise UserError(f"optimizer {name!r}: {error}") from error

    return Entry(name, build, config)


class _TorchConfig:
    """Options of a class of `torch.optim`; None: the class's own default."""

    KIND: ClassVar[Callable[..., torch.optim.Optimizer]]

    def given(self) -> dict[str, Any]:
        """The constructor's arguments."""
        values = {name: value for name, value in defaults_of(self).items() if value is not None}
        return values | ({"fused": True} if getattr(self.KIND, "__name__", "") in _FUSED else {})

    def validate(self) -> Iterator[str]:
        """The constructor's refusal, if any; the message names the first option at which it refuses."""
        values: dict[str, Any] = {}
        for name, value in self.given().items():
            values[name] = value
            try:
                type(self).KIND([torch.zeros(1, 1)], **values)
            except (ValueError, TypeError, RuntimeError, LookupError) as error:
                yield f"{name} is {value}: {error}"
                return

    @property
    def state_bytes(self) -> float:
        """Counted on a small parameter."""
        parameter = torch.zeros(8, 8, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        optimizer = type(self).KIND([parameter], **self.given())
        optimizer.step()
        state = (value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor))
        return sum(value.nbytes for value in state if value.shape == parameter.shape) / parameter.numel()


def _config_of(kind: Any) -> type:
    """A dataclass of a constructor's arguments; `lr` and `weight_decay` have its defaults, others None for them."""
    fields: list[Any] = []
    for own in inspect.signature(kind).parameters.values():
        if own.name in ("lr", "weight_decay"):
            text = "peak learning rate; the schedule scales it" if own.name == "lr" else "biases and norms have none"
            fields.append((own.name, float, option(float(own.default), text)))
        elif own.name not in _NO_OPTIONS:
            text = f"as of torch.optim.{kind.__name__}; default {own.default}"
            fields.append((own.name, _type_of(own), option(None, text)))
    return dataclasses.make_dataclass(
        f"{kind.__name__}Config", fields, bases=(_TorchConfig,), namespace={"KIND": staticmethod(kind)}, kw_only=True
    )


def _type_of(parameter: inspect.Parameter) -> Any:
    """The type of an option, in terms of `ftk.config.options`, from the annotation in torch's source."""
    annotation = str(parameter.annotation)
    if "tuple" in annotation.lower():
        return list[float] | None
    named = {"bool": bool, "int": int, "str": str}
    return next((own | None for word, own in named.items() if word in annotation.replace("<class", "")), float | None)
