"""The model that an adapter is for, with its parameters in our form and in Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ftk.checkpoint.hf_classifier import renames_of
from ftk.errors import UserError
from ftk.models.conversion import Converter
from ftk.models.renames import LAYER_NUMBER, SAME, Layout, LazyTensors, Rename, renamed
from ftk.modules.heads import HeadShape
from ftk.registry import HF_MODELS

if TYPE_CHECKING:
    from ftk.checkpoint.weights import Weights


class AdaptedModel(NamedTuple):
    """The model that an adapter is for.

    Attributes:
        name: registered one.
        config: its options.
        head: in the place of its output layer, if it has one there.
        weights: its tensors; further ones do not matter.
    """

    name: str
    config: Any
    head: HeadShape | None
    weights: Weights

    def theirs(self) -> Sequence[Rename]:
        """The parameters in Hugging Face's form; empty where there is none."""
        if self.name not in HF_MODELS:
            return ()
        return renames_of(self.converter(), self.head, self.config)

    def converter(self) -> Converter:
        """Of the family, which has a form of Hugging Face's."""
        return HF_MODELS.get(self.name).target()  # type: ignore[no-any-return]

    def unread(self) -> Sequence[str]:
        """Tensors in Hugging Face's form that nothing of ours reads; a head may read them."""
        return self.converter().unread(self.config) if self.head is None else ()

    def copies(self) -> Mapping[str, str]:
        """Tensor in Hugging Face's form -> the one that it is tied to."""
        tied = {} if self.head is not None else self.converter().tied(self.config)
        return {name: first for name, first in tied.items() if name not in self.unread()}

    def tensor(self, name: str) -> Tensor:
        """One of the parameters.

        Raises:
            UserError: its weights are rounded.
        """
        stored = self.weights.names.get(name)
        if stored is None:
            raise UserError(f"needs {name} of the model, whose weights are quantised")
        return self.weights.read(stored).float()

    def their_tensor(self, name: str) -> Tensor:
        """One of the parameters in Hugging Face's form."""
        link = link_of(name, self.theirs(), self.shapes(), back=False)
        if link is None:
            raise UserError(f"has {name}, which the model lacks")
        ours = LazyTensors.of({target: self.tensor(target) for target in link.targets})
        return renamed(ours, self.theirs(), self.config, back=True).read(name)

    def shapes(self) -> dict[str, Sequence[int]]:
        """Of the parameters; those of rounded weights have other columns."""
        found = {name: self.weights.tensors[stored].shape for name, stored in self.weights.names.items()}
        return {name.replace(".quantized_weight", ".weight"): shape for name, shape in found.items()}


class Link(NamedTuple):
    """Parameters of one model, and those of the other that hold the same numbers; `back`: the first are ours."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    layout: Layout
    back: bool

    def reversed(self) -> Link:
        return Link(self.targets, self.sources, self.layout, not self.back)

    def is_transposed(self, size: int, config: Any) -> bool:
        """Whether they keep such a matrix as [in, out]; size: of all outputs."""
        count = len(self.sources if self.back else self.targets)
        return len(self.layout.split([torch.zeros(size // count, 1)] * count, config)[0]) == 1

    def moved(self, rows: Sequence[Tensor], config: Any) -> list[Tensor]:
        """Rows of each source, [O, ...], as rows of each target."""
        flat = [tensor if tensor.dim() > 1 else tensor[:, None] for tensor in rows]
        turned = self.is_transposed(sum(map(len, flat)), config)
        if self.back:
            found = [tensor.t() if turned else tensor for tensor in self.layout.split(flat, config)]
        else:
            found = [*self.layout.join([tensor.t() if turned else tensor for tensor in flat], config)]
        return [tensor.contiguous() if rows[0].dim() > 1 else tensor.flatten() for tensor in found]

    def keeps_columns(self, sizes: Sequence[int], count: int, config: Any) -> bool:
        """Whether the inputs of such matrices are in the same order in both; else A would have to be moved, too."""
        columns = torch.arange(count).expand(sum(sizes), -1)
        found = self.moved(columns.split([*sizes]), config)
        return all(torch.equal(tensor, columns[: len(tensor)]) for tensor in found)


def link_of(name: str, renames: Sequence[Rename], ours: Mapping[str, Any], *, back: bool) -> Link | None:
    """What a parameter goes with, in a model that has the parameters `ours`; `back`: it is one of them."""
    match = LAYER_NUMBER.search(name)
    pattern, number = LAYER_NUMBER.sub("*", name, count=1), match[0] if match else "*"
    for rename in renames:
        here, there = rename[:2] if back else (rename.theirs, rename.ours)
        if pattern not in here or any(part.replace("*", number) not in ours for part in rename.ours):
            continue
        if rename.layout is SAME:  # one of several pairs
            place = here.index(pattern)
            here, there = (pattern,), (there[place],)
        sides = [tuple(part.replace("*", number) for part in side) for side in (here, there)]
        return Link(sides[0], sides[1], rename.layout, back)
    return None
