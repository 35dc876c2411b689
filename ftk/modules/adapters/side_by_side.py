"""Several LoRA adapters beside one frozen model: each row of a batch is read with its own, or with none.

The rows of an adapter are gathered, go through its two small matrices and are added where they came from (Chen et al.
2023, "Punica", https://arxiv.org/abs/2310.18547, whose kernel does that in one pass on a GPU).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.adapters.adapt import Adapted, is_adapted, linear_layers, mix_in
from ftk.modules.adapters.lora import LoRA, factory_kwargs
from ftk.modules.few_rows import linear


class Choice:
    """Which adapter each row of the next forward pass is read with; shared by all layers of a model.

    Attributes:
        names: of the adapters; number n, from 1 on, is names[n - 1], and 0 is none.
        rows: (number, int64 [n]: rows of dimension 0, or None for all) of the adapters that are used.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.rows: list[tuple[int, Tensor | None]] = []
        self._numbers: list[int] = [0]

    def number(self, name: str | None) -> int:
        """Of an adapter; None is the model without one."""
        return 0 if name is None else self.names.index(name) + 1

    def take(self, numbers: list[int], device: torch.device) -> None:
        """Has row i of what is read next go with adapter numbers[i]; one number is for any count of rows."""
        if numbers == self._numbers:  # as in most steps
            return
        found: list[tuple[int, Tensor | None]] = []
        for number in sorted({*numbers} - {0}):
            own = [row for row, other in enumerate(numbers) if other == number]
            found.append((number, None if len(own) == len(numbers) else torch.tensor(own, device=device)))
        self.rows, self._numbers = found, [*numbers]


class Difference(nn.Module):
    """s B A x of one adapter in one layer; see `ftk.modules.adapters.lora`."""

    def __init__(self, into: Tensor, back: Tensor, scale: float) -> None:
        super().__init__()
        self.into, self.back = (nn.Parameter(one, requires_grad=False) for one in (into, back))  # [r, I], [O, r]
        self.scale = scale

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        return self.scale * linear(linear(hidden, self.into), self.back)


class SideBySideLinear(Adapted):
    """W x + b, plus the difference of the adapter that `choice` names for a row, if it has one for this layer."""

    choice: Choice
    differences: nn.ModuleDict  # number of an adapter -> its `Difference`

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [R, ..., I] -> [R, ..., O]"""
        found: Tensor = super().forward(hidden)
        for number, rows in self.choice.rows:
            if str(number) not in self.differences:
                continue
            difference = self.differences[str(number)]
            if rows is None:
                found = found + difference(hidden)
            else:
                found.index_add_(0, rows, difference(hidden.index_select(0, rows)))
        return found


@torch.no_grad()
def put_side_by_side(model: nn.Module, adapters: Mapping[str, tuple[Any, Mapping[str, Tensor]]]) -> None:
    """Puts LoRA adapters on a model, in place; it is read without any until a `Choice` names one.

    Args:
        adapters: name -> (the adapter, its tensors by their names in the model).

    Raises:
        UserError: the model has an adapter already; one is no plain LoRA, was trained with other parameters besides, or
            does not fit a layer.
    """
    if is_adapted(model):
        raise UserError("the model has an adapter already; merge that first")
    choice, layers = Choice([*adapters]), linear_layers(model)
    of_rounded = {"dtype": next(model.parameters()).dtype}  # layers with rounded weights have no type of their own
    for number, (name, (adapter, tensors)) in enumerate(adapters.items(), start=1):
        if not isinstance(adapter, LoRA) or adapter.config.weight_decomposed:
            raise UserError(f"adapter {name}: is no plain LoRA, and only those share a model; serve it alone")
        left = dict(tensors)
        for layer, value in adapter.config.targets():
            into, back = (left.pop(f"{layer}.{part}.weight", None) for part in ("lora_A", "lora_B"))
            part: Any = layers.get(layer)
            if part is None or into is None or back is None:
                raise UserError(f"adapter {name}: the model has no layer {layer}, or the adapter no matrices for it")
            if (into.shape[1], len(back)) != (part.in_features, part.out_features):
                raise UserError(
                    f"adapter {name}: {layer} has {part.in_features} inputs and {part.out_features} outputs, the "
                    f"adapter's matrices have {into.shape[1]} and {len(back)}"
                )
            if not isinstance(part, SideBySideLinear):
                part.differences, part.choice = nn.ModuleDict(), choice
                mix_in(part, SideBySideLinear)
            own = factory_kwargs(part) | ({} if isinstance(part, nn.Linear) else of_rounded)
            part.differences[str(number)] = Difference(into.to(**own), back.to(**own), adapter.scale_for(value))
        if left:
            raise UserError(
                f"adapter {name}: was trained with other parameters besides ({next(iter(left))}), which the others "
                "lack; serve it alone"
            )


def choice_of(model: nn.Module) -> Choice | None:
    """That of a model with adapters side by side; else None."""
    return next((part.choice for part in model.modules() if isinstance(part, SideBySideLinear)), None)
