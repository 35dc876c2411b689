"""State dicts that other programs cut into one part per tensor parallel rank, as Megatron-LM does.

A parameter is cut along its rows or its columns (Shoeybi et al. 2019, section 3, https://arxiv.org/abs/1909.08053), or
is whole in each part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.errors import UserError


class Cut(NamedTuple):
    """How parameters are cut.

    Attributes:
        names: pattern that is searched for in their names.
        dim: that is cut.
        pieces: blocks along it that are cut each by itself.
        what: is counted by a block's size, for messages.
    """

    names: re.Pattern[str]
    dim: int
    pieces: int = 1
    what: str = ""


def cut_of(name: str, cuts: Sequence[Cut]) -> Cut | None:
    """How the parameter of this name is cut; None: it is whole in each part."""
    return next((cut for cut in cuts if cut.names.search(name)), None)


def merge(name: str, parts: Sequence[Tensor], cuts: Sequence[Cut]) -> Tensor:
    """A parameter of its parts, in the order of their ranks; also on the meta device."""
    cut = cut_of(name, cuts)
    if cut is None:
        return parts[0]
    blocks = zip(*(part.chunk(cut.pieces, cut.dim) for part in parts), strict=True)
    return torch.cat([piece for block in blocks for piece in block], cut.dim)


def split(name: str, value: Tensor, num_parts: int, cuts: Sequence[Cut]) -> list[Tensor]:
    """The inverse of `merge`.

    Raises:
        UserError: `num_parts` does not divide what must be cut.
    """
    cut = cut_of(name, cuts)
    if cut is None:
        return [value] * num_parts
    blocks = value.chunk(cut.pieces, cut.dim)
    size = blocks[0].size(cut.dim)
    if num_parts < 1 or size % num_parts:
        raise UserError(f"{num_parts} model-parallel parts do not divide {name!r}, size {size}")
    pieces = zip(*(block.chunk(num_parts, cut.dim) for block in blocks), strict=True)
    return [torch.cat(piece, cut.dim) for piece in pieces]


def check_same_names(parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse parts of different models.

    Args:
        parts: what a part is called -> its state dict.

    Raises:
        UserError: one of two parts holds a parameter that the other does not.
    """
    first = next(iter(parts))
    for name, part in parts.items():
        if different := sorted(part.keys() ^ parts[first].keys()):
            raise UserError(f"{name} and {first} do not belong together: only one of them holds {different[0]!r}")
