"""LoRA: what is added to a frozen weight is a product of two small trained matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.adapters import LoRAConfig
from ftk.modules.adapters.adapt import AdaptedLinear, mix_in
from ftk.modules.dropout import Dropout
from ftk.modules.initialization import Constant, declare, declare_as_torch


class LoRA:
    """Adds B A to the weights of linear layers (Hu et al. 2021, section 4.1, https://arxiv.org/abs/2106.09685).

    A starts as in the authors' code, uniform within 1 / sqrt(I), and B at 0.

    Args:
        config: ranks, scaling, dropout.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("lora_A", "lora_B", "lora_magnitude_vector")

    def __init__(self, config: LoRAConfig) -> None:
        self.config = config

    def put_on(self, layer: Any, value: str) -> None:
        """See `ftk.modules.adapters.adapt.Adapter`.

        Raises:
            UserError: `value` is no RANK or RANK/ALPHA.
        """
        config, (rank, _) = self.config, self._rank_and_alpha(value)
        options = factory_kwargs(layer)
        into = nn.Linear(layer.in_features, rank, bias=False, **options)
        back = nn.Linear(rank, layer.out_features, bias=False, **options)
        layer.lora_A = declare_as_torch(into, layer.in_features)
        layer.lora_B = declare(back, weight=Constant(0.0))
        layer.lora_dropout = Dropout(config.lora_dropout) if config.lora_dropout else nn.Identity()
        layer.lora_scale = self.scale_for(value)
        if config.weight_decomposed:
            layer.lora_magnitude_vector = nn.Parameter(torch.empty(layer.out_features, **options))
            declared: Mapping[str, Any] = getattr(layer, "initial_values", {})
            declare(layer, **declared, lora_magnitude_vector=Constant(1.0))
        mix_in(layer, DoRALinear if config.weight_decomposed else LoRALinear)

    def scale_for(self, value: str) -> float:
        """Factor on what is added to a layer with `value` behind its pattern."""
        rank, alpha = self._rank_and_alpha(value)
        return alpha / (rank if self.config.lora_scaling == "alpha_over_rank" else math.sqrt(rank))

    def _rank_and_alpha(self, value: str) -> tuple[int, float]:
        found = self.config.rank_and_alpha(value)
        if found is None:
            raise UserError(f"`adapter_targets`: {value!r} must be RANK or RANK/ALPHA, e.g. 16/32")
        return found


class LoRALinear(AdaptedLinear):
    """W x + b + s B A dropout(x), A [r, I], B [O, r]; s = alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023)."""

    lora_A: nn.Linear
    lora_B: nn.Linear
    lora_dropout: nn.Module
    lora_scale: float

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        return super().forward(hidden) + self.added(hidden)

    def added(self, hidden: Tensor) -> Tensor:
        """What the adapter adds: hidden [..., I] -> [..., O]"""
        return self.lora_scale * self.lora_B(self.lora_A(self.lora_dropout(hidden)))

    def merged_weight(self) -> Tensor:
        return upcast(self.weight) + self._difference()

    def unmerge_weight(self, before: Any) -> None:
        self.weight.copy_(upcast(self.weight) - self._difference())

    def _difference(self) -> Tensor:
        """s B A, [O, I]"""
        return self.lora_scale * (upcast(self.lora_B.weight) @ upcast(self.lora_A.weight))

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        shared = {name: options[name] for name in ("units", "unit_name", "fused") if name in options}
        whole = {"style": "sharded", "own_random": False}  # of which each rank has a part of the gradient
        if style == "column":  # every rank reads all of `hidden`
            return {"lora_A": whole, "lora_B": {"style": "column_part", **shared}, "lora_dropout": "replicated"}
        if style == "row":  # what is added is a part of the sum over the ranks, as the layer's own product is
            # Without dropout no number is drawn, so that what is drawn next is what one process draws.
            dropout = whole if isinstance(self.lora_dropout, nn.Identity) else "sharded"
            return {"lora_A": {"style": "row_part", **shared}, "lora_B": whole, "lora_dropout": dropout}
        return dict.fromkeys(("lora_A", "lora_B", "lora_dropout"), style)


class DoRALinear(LoRALinear):
    """m (W + s B A) x / |W + s B A| + b, the norm of each row taken as a constant (Liu et al. 2024, section 4.3).

    m [O] starts as the norms of W (https://arxiv.org/abs/2402.09353).
    """

    lora_magnitude_vector: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        whole = super(LoRALinear, self).forward(hidden)
        product = whole if self.bias is None else whole - self.bias
        factor = self._factor(self._row_norms()).to(whole.dtype)  # [O]
        # In this form a factor of 1 changes no bit.
        return whole + (factor - 1.0) * product + factor * self.added(hidden)

    def init_from_weights(self) -> None:
        self.lora_magnitude_vector.copy_(torch.linalg.vector_norm(upcast(self.weight), dim=1))

    def merged_weight(self) -> Tensor:
        return super().merged_weight() * self._factor(self._row_norms())[:, None]

    def merge_weight(self) -> Tensor:
        norms = self._row_norms()
        super().merge_weight()
        return norms

    def unmerge_weight(self, before: Tensor) -> None:
        self.weight.copy_(upcast(self.weight) / self._factor(before)[:, None])
        super().unmerge_weight(None)

    @torch.no_grad()
    def _row_norms(self) -> Tensor:
        """|W + s B A| of each row, [O]"""
        with torch.autocast(self.lora_A.weight.device.type, enabled=False):
            return torch.linalg.vector_norm(super().merged_weight(), dim=1)

    def _factor(self, norms: Tensor) -> Tensor:
        """m / norms, [O]; 1 for a row of zeros, which has no direction.

        Norms are rounded as m is, so that beside weights in bf16 all are 1 at the start, too.
        """
        norms = upcast(norms.to(self.lora_magnitude_vector.dtype))
        has_none = norms == 0
        return (upcast(self.lora_magnitude_vector) / norms.masked_fill(has_none, 1.0)).masked_fill(has_none, 1.0)

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        raise UserError(
            "`weight_decomposed` needs whole rows of weights; leave it out, or use `data_parallel_shard_size` instead "
            "of `tensor_parallel_size`"
        )


def factory_kwargs(layer: Any) -> dict[str, Any]:
    """Device and type of parts beside a linear layer, whose weight may be rounded."""
    tensor = layer.weight if isinstance(layer, nn.Linear) else layer.quantized_weight
    return {"device": tensor.device, "dtype": tensor.dtype if tensor.is_floating_point() else torch.float32}


def upcast(tensor: Tensor) -> Tensor:
    """In float32, or in float64 if it is that."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
