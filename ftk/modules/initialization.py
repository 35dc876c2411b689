"""Initial values, declared where a parameter is made and drawn by its name and a seed, whatever the world size."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)


class Initial(Protocol):
    """What a parameter is at the start: a function of its arguments alone."""

    def __call__(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        """The whole value, float32 on the CPU.

        Args:
            name: the parameter's full name in its model, such as "layers.0.attention.qkv.weight".
            shape: of the whole parameter, also where a rank keeps only a part of it.
            seed: of the whole model.
        """


class Normal(NamedTuple):
    """Draws from N(0, std), from a generator of this parameter's own."""

    std: float

    def __call__(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(_seed_for(seed, name))
        return torch.empty(tuple(shape), device="cpu", dtype=torch.float32).normal_(0.0, self.std, generator=generator)


class Constant(NamedTuple):
    """The same number everywhere."""

    value: float

    def __call__(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        return torch.full(tuple(shape), self.value, device="cpu", dtype=torch.float32)


def declare(module: Module, **initial: Initial) -> Module:
    """The module, which now says what its own parameters or buffers are at the start.

        self.output = declare(nn.Linear(hidden_size, hidden_size), weight=Normal(0.02))

    Biases need no declaration, they start at 0; nor do the weights of norms, which start at 1.
    """
    module.initial_values = initial  # type: ignore[assignment]
    return module


def initial_of(module: nn.Module, own_name: str) -> Initial | None:
    """What was declared for a module's parameter or buffer; None: nothing was."""
    declared: dict[str, Any] = getattr(module, "initial_values", {})
    if own_name in declared:
        found: Initial = declared[own_name]
        return found
    if own_name == "bias":
        return Constant(0.0)
    if own_name == "weight" and isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return Constant(1.0)
    return None


def _seed_for(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a generator takes 63 bits
