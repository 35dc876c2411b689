"""Initial values, declared where a parameter is made and drawn by its name and a seed, whatever the world size."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

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
        values = torch.empty(tuple(shape), device="cpu", dtype=torch.float32)
        return values.normal_(0.0, self.std, generator=_generator(seed, name))


class Uniform(NamedTuple):
    """Draws evenly from -bound to bound, from a generator of this parameter's own."""

    bound: float

    def __call__(self, name: str, shape: Sequence[int], seed: int) -> Tensor:
        values = torch.empty(tuple(shape), device="cpu", dtype=torch.float32)
        return values.uniform_(-self.bound, self.bound, generator=_generator(seed, name))


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


def declare_as_torch(module: Module, size: int) -> Module:
    """The module, whose own parameters start as those of torch's: uniform within the root of 1 / `size`."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    return declare(module, **dict.fromkeys(names, Uniform(1.0 / math.sqrt(size))))


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


@torch.no_grad()
def draw(model: nn.Module, is_drawn: Callable[[str], bool], seed: int | None = None) -> None:
    """Give parameters their initial values, but for those on the meta device, and for none inside of `undrawn`.

    Args:
        model: has them; each has a declared initial value.
        is_drawn: which ones, by their names.
        seed: of the values; that of torch's generator if None.
    """
    if is_undrawn():
        return
    seed = torch.initial_seed() if seed is None else seed
    for name, parameter in model.named_parameters():
        if is_drawn(name) and not parameter.is_meta:
            owner, _, own_name = name.rpartition(".")
            initial = initial_of(model.get_submodule(owner), own_name)
            assert initial is not None, f"{name} has no declared initial value"
            parameter.copy_(initial(name, parameter.shape, seed))


@contextmanager
def undrawn() -> Iterator[None]:
    """Models that are made inside have no initial weights, but what their memory holds: all are read from a file next.

    Drawing them takes longer than reading them: 1.7 of 2.9 seconds for GPT-2 (124M).
    """
    token = _undrawn.set(True)
    try:
        with _WithoutDraws():
            yield
    finally:
        _undrawn.reset(token)


def is_undrawn() -> bool:
    """Whether a model that is made now is made inside of `undrawn`."""
    return _undrawn.get()


_undrawn = ContextVar("undrawn", default=False)


class _WithoutDraws(TorchFunctionMode):
    """What the modules of `torch.nn` draw when they are made is left out."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)  # it takes 63 bits
