"""(IA)^3: a trained vector scales what a frozen layer gives, or what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.modules.adapters import INPUTS, IA3Config
from ftk.modules.adapters.adapt import AdaptedLinear, mix_in
from ftk.modules.adapters.lora import factory_kwargs, upcast
from ftk.modules.initialization import Constant, declare


class IA3:
    """Scales the outputs of linear layers, or their inputs (Liu et al. 2022, 3.3, https://arxiv.org/abs/2205.05638).

    The vectors start at 1. Of a joint projection queries are scaled, too, as peft does with GPT-2's.

    Args:
        config: which layers.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("ia3_l",)

    def __init__(self, config: IA3Config) -> None:
        self.config = config

    def put_on(self, layer: Any, value: str) -> None:
        """See `ftk.modules.adapters.adapt.Adapter`; value: "inputs", or "" for the outputs."""
        size = layer.in_features if value == INPUTS else layer.out_features
        layer.ia3_l = nn.Parameter(torch.empty(size, **factory_kwargs(layer)))
        declared: Mapping[str, Any] = getattr(layer, "initial_values", {})
        declare(layer, **{**declared, "ia3_l": Constant(1.0)})
        mix_in(layer, ScaledInputs if value == INPUTS else ScaledOutputs)


class ScaledOutputs(AdaptedLinear):
    """l * (W x + b), l [O]"""

    ia3_l: Tensor
    of_outputs: ClassVar[tuple[str, ...]] = ("ia3_l",)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        output = super().forward(hidden)
        return output * self.ia3_l.to(output.dtype)  # type: ignore[no-any-return]

    def merged_weight(self) -> Tensor:
        return upcast(self.weight) * upcast(self.ia3_l)[:, None]

    def merged_bias(self) -> Tensor | None:
        return None if self.bias is None else (upcast(self.bias) * upcast(self.ia3_l)).to(self.bias.dtype)

    def merge_weight(self) -> tuple[Tensor, Tensor | None]:
        # A division would not take out a factor of 0.
        before = self.weight.clone(), None if self.bias is None else self.bias.clone()
        bias = self.merged_bias()
        super().merge_weight()
        if bias is not None:
            self.bias.copy_(bias)
        return before

    def unmerge_weight(self, before: tuple[Tensor, Tensor | None]) -> None:
        weight, bias = before
        self.weight.copy_(weight)
        if bias is not None:
            self.bias.copy_(bias)

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}  # the vector is the layer's own


class ScaledInputs(ScaledOutputs):
    """W (l * x) + b, l [I]"""

    of_inputs, of_outputs = ("ia3_l",), ()

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        return super(ScaledOutputs, self).forward(hidden * self.ia3_l.to(hidden.dtype))  # type: ignore[misc, no-any-return]

    def merged_weight(self) -> Tensor:
        return upcast(self.weight) * upcast(self.ia3_l)

    def merged_bias(self) -> Tensor | None:
        return self.bias
