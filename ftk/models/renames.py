"""Parameters that other programs name and lay out otherwise: renames as data, which make tensors lazily.

RENAMES = (Rename(("token_embedding.weight",), ("transformer.wte.weight",)),)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ftk.errors import UserError

LAYER_NUMBER = re.compile(r"(?<=\.)\d{1,9}(?=\.)")
_NAMES_SHOWN = 6
_ROWS = 1024  # compared at a time


class Layout(Protocol):
    """How the same numbers lie in our tensors and in theirs; `join` and `split` are each other's inverse.

    Both work on the meta device, too: shapes are asked for before a tensor is read.
    """

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        """Tensors as `Rename.theirs` names them -> as `Rename.ours` does; `config` is the model's."""

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        """The inverse of `join`."""


class Same:
    """One tensor, as it is."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return theirs

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return ours


SAME = Same()


def _joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """`torch.cat`; of tensors on the meta device without torch._dynamo, whose import takes 0.4 s."""
    if not parts[0].is_meta:
        return torch.cat(list(parts), dim)
    shape, dtype = list(parts[0].shape), parts[0].dtype
    for part in parts[1:]:
        if [*part.shape[:dim], *part.shape[dim + 1 :]] != [*shape[:dim], *shape[dim + 1 :]]:
            raise ValueError(f"{list(part.shape)} beside {shape}")
        shape[dim] += part.size(dim)
        dtype = torch.promote_types(dtype, part.dtype)
    return parts[0].new_empty(shape, dtype=dtype)


class Transposed:
    """One matrix that they keep as [in, out]."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [theirs[0].t()]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [ours[0].t()]


@dataclass(frozen=True)
class JointHeads:
    """One joint projection, whose rows are [q | k | v] in their tensor, [A, 3, D] in ours.

    `transposed`: they keep it as [in, out].
    """

    transposed: bool = False

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        rows = theirs[0].t() if self.transposed else theirs[0]  # [3 H, ...]
        return [rows.unflatten(0, (3, config.num_attention_heads, -1)).transpose(0, 1).flatten(0, 2)]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        rows = ours[0].unflatten(0, (config.num_attention_heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return [rows.t() if self.transposed else rows]


class SeparateHeads:
    """Projections of queries, keys and values apart in theirs, one tensor of rows [K, A/K + 2, D] in ours."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        parts = [tensor.unflatten(0, (config.kv_heads, -1)) for tensor in theirs]  # [K, A/K D, ...], [K, D, ...] twice
        return [_joined(parts, dim=1).flatten(0, 1)]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        size = config.head_size
        rows = ours[0].unflatten(0, (config.kv_heads, -1))  # [K, (A/K + 2) D, ...]
        return [part.flatten(0, 1) for part in rows.split([rows.size(1) - 2 * size, size, size], dim=1)]


class SeparateKeysAndValues(SeparateHeads):
    """Projections of keys and values apart in theirs, one tensor of rows [A, 2, D] in ours."""

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        rows = ours[0].unflatten(0, (config.kv_heads, 2, -1))  # [A, 2, D, ...]
        return [rows[:, 0].flatten(0, 1), rows[:, 1].flatten(0, 1)]


class JointGroups(SeparateHeads):
    """One joint projection, whose rows are [q | k | v] in their tensor, [K, A/K + 2, D] in ours."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        sizes = [heads * config.head_size for heads in (config.num_attention_heads, config.kv_heads, config.kv_heads)]
        return super().join(theirs[0].split(sizes), config)

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [_joined(super().split(ours, config))]


class Halves:
    """One matrix of theirs whose halves of the rows are two of ours."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        first, second = theirs[0].unflatten(0, (2, -1))
        return [first, second]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [_joined(ours)]


HALVES = Halves()


class Rename(NamedTuple):
    """Parameters of ours and the ones of theirs that hold the same numbers; `*` in a name is a layer's number.

    A name may have other numbers behind it: "block.*.layer.0.norm".
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    layout: Layout = SAME


def weight_and_bias(ours: str, theirs: str, weight: Layout = SAME, bias: Layout = SAME) -> tuple[Rename, Rename]:
    """The two parameters of a layer, whose names end in `.weight` and `.bias` on both sides."""
    return (
        Rename((f"{ours}.weight",), (f"{theirs}.weight",), weight),
        Rename((f"{ours}.bias",), (f"{theirs}.bias",), bias),
    )


def weights(ours: Sequence[str], theirs: Sequence[str], layout: Layout = SAME) -> Rename:
    """Parameters whose names end in `.weight` on both sides."""
    return Rename(tuple(f"{name}.weight" for name in ours), tuple(f"{name}.weight" for name in theirs), layout)


def weights_and_biases(ours: Sequence[str], theirs: Sequence[str], layout: Layout) -> tuple[Rename, ...]:
    """As `weights`, and those whose names end in `.bias` on both sides."""
    return tuple(
        Rename(tuple(f"{name}.{kind}" for name in ours), tuple(f"{name}.{kind}" for name in theirs), layout)
        for kind in ("weight", "bias")
    )


class LazyTensors(NamedTuple):
    """Named tensors that are read when they are needed.

    Attributes:
        described: name -> a tensor on the meta device, for its shape and dtype.
        read: name -> the tensor.
    """

    described: Mapping[str, Tensor]
    read: Callable[[str], Tensor]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> LazyTensors:
        """Tensors that are in memory."""
        described = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        return cls(described, tensors.__getitem__)

    def differ(self, name: str, other: str) -> bool:
        """Whether there is a tensor that is not the same as another."""
        if name not in self.described:
            return False
        if other not in self.described or self.described[name].shape != self.described[other].shape:
            return True
        # What is read is mapped from a file, as a rule: no more of it is looked at than the first rows that differ.
        one, another = (torch.atleast_1d(self.read(stored)).split(_ROWS) for stored in (name, other))
        return not all(map(_equal, one, another))

    def under(self, names: Mapping[str, str]) -> LazyTensors:
        """Some of the tensors under other names: new name -> name here."""
        described = {new: self.described[name] for new, name in names.items()}
        return LazyTensors(described, lambda new: self.read(names[new]))

    def without(self, names: Collection[str]) -> LazyTensors:
        """The others than those of these names, of which there may be some."""
        return LazyTensors({name: one for name, one in self.described.items() if name not in names}, self.read)

    def joined(self, more: LazyTensors) -> LazyTensors:
        """The tensors of both; of a name that both have, the other's."""
        described = {**self.described, **more.described}
        return LazyTensors(described, lambda name: (more if name in more.described else self).read(name))

    def all(self) -> dict[str, Tensor]:
        """Every tensor, in memory."""
        return {name: self.read(name) for name in self.described}


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether the numbers are the same; torch compares no float8 with another type."""
    return torch.equal(one, other) if one.dtype == other.dtype else torch.equal(one.double(), other.double())


def without_copies(tensors: LazyTensors, tied: Mapping[str, str], hint: str = "") -> LazyTensors:
    """The tensors without those that repeat another one.

    Args:
        tensors: theirs.
        tied: name -> the one whose numbers it repeats; where that is missing, it gets its name.
        hint: for the message, what else the two may be.

    Raises:
        UserError: the two differ.
    """
    names = {name: name for name in tensors.described}
    for repeated, first in tied.items():
        if repeated in names and first in names:
            if tensors.differ(names[repeated], names[first]):
                raise UserError(f"{repeated} differs from {first}; ftk's model has one tensor for both{hint}")
            del names[repeated]
        elif repeated in names:
            names[first] = names.pop(repeated)
    return tensors.under(names)


class _Move(NamedTuple):
    """How one tensor is made: the names of its sources, its layout, and `which` of its results."""

    sources: tuple[str, ...]
    layout: Layout
    which: int


def renamed(tensors: LazyTensors, renames: Sequence[Rename], config: Any, *, back: bool = False) -> LazyTensors:
    """Tensors under our names and in our layouts, made of theirs one at a time.

    Args:
        tensors: theirs.
        renames: all parameters that there can be. Where several name one, it is that whose others are there, too.
        config: of the model, for the layouts.
        back: `tensors` are ours, and theirs are made.

    Raises:
        UserError: a tensor without a place in the model, without those that it belongs with, or of a wrong shape.
    """
    moves: dict[str, _Move] = {}
    table: dict[str, list[Rename]] = {}
    for rename in renames:
        for pattern in rename.ours if back else rename.theirs:
            table.setdefault(pattern, []).append(rename)
    for name in tensors.described:
        match = LAYER_NUMBER.search(name)
        found = table.get(name) or table.get(LAYER_NUMBER.sub("*", name, count=1))
        if found is None:
            some = ", ".join(list(table)[:_NAMES_SHOWN])
            raise UserError(f"parameter {name!r:.200} has no place in the model; known are {some} ...")
        number = match[0] if match else "*"
        for rename in found:
            ours, theirs = (tuple(part.replace("*", number) for part in side) for side in rename[:2])
            sources, results = (ours, theirs) if back else (theirs, ours)
            missing = [source for source in sources if source not in tensors.described]
            if not missing:
                break
        if missing:
            raise UserError(f"parameter {missing[0]!r} is missing, which belongs with {name!r}")
        moves |= {result: _Move(sources, rename.layout, index) for index, result in enumerate(results)}

    def made(name: str, read: Callable[[str], Tensor]) -> Tensor:
        sources, layout, which = moves[name]
        found = [read(source) for source in sources]
        return (layout.split if back else layout.join)(found, config)[which]

    def described(name: str) -> Tensor:
        try:
            return made(name, tensors.described.__getitem__)
        except (IndexError, RuntimeError, ValueError) as error:
            shapes = " and ".join(f"{source} {list(tensors.described[source].shape)}" for source in moves[name].sources)
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise UserError(f"{shapes}: does not have the shape of such a parameter ({why:.200})") from error

    for move in moves.values():
        kinds = {tensors.described[source].is_floating_point(): source for source in move.sources}
        if len(kinds) > 1:  # joined, they would all be turned into real numbers
            dtype = tensors.described[kinds[False]].dtype
            raise UserError(f"{kinds[False]} has numbers of type {dtype}, unlike others")
    return LazyTensors({name: described(name) for name in moves}, lambda name: made(name, tensors.read))
