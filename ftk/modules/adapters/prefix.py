"""Prefix tuning: in each layer all tokens see trained keys and values besides those of their text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.modules.adapters import PrefixConfig
from ftk.modules.adapters.adapt import Adapted, in_blocks, mix_in
from ftk.modules.adapters.lora import factory_kwargs
from ftk.modules.attention import Attend, Attention, Front, attend_with_front
from ftk.modules.initialization import Normal, declare, declare_as_torch


class PrefixTuning:
    """Gives n keys and values to the attention of each layer (Li and Liang 2021, https://arxiv.org/abs/2101.00190).

    They are seen by all tokens and have no positions. That each layer has its own is P-tuning v2 (Liu et al. 2022,
    https://arxiv.org/abs/2110.07602), whose code they are drawn as: from N(0, 1), directly or before the network.

    Args:
        config: how many; what makes them; whether positions begin behind them.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("prefix",)

    def __init__(self, config: PrefixConfig) -> None:
        self.config = config

    def places(self, model: nn.Module) -> dict[str, nn.Module]:
        """The attention of each block; with `prefix_positions` also the model itself, under the name "".

        Raises:
            UserError: an attention is of a form that takes no keys besides its own.
        """
        found: dict[str, nn.Module] = {**in_blocks(model, Attention)}
        for part in found.values():
            if type(part).forward is not Attention.forward:
                raise UserError(f"{type(part).__name__} takes no prefix; use `adapter` lora with this model")
        return found | ({"": model} if found and self.config.prefix_positions else {})

    def put_on(self, layer: Any, value: str) -> None:
        """See `ftk.modules.adapters.adapt.Adapter`; layer: one of `places`.

        Raises:
            UserError: `prefix_positions`, and the model has no table of learned positions, or a shorter one.
        """
        config, num_tokens = self.config, self.config.num_virtual_tokens
        if isinstance(layer, Attention):
            heads, size = layer.key_shape
            sizes = {"num_rows": 2 * heads * size, "head_size": size, "hidden_size": layer.qkv.in_features}
            options = factory_kwargs(layer.qkv)
            layer.prefix = Prefix(num_tokens, **sizes, width=config.prefix_hidden_size, options=options)
            mix_in(layer, PrefixedAttention)
            return
        table, rows = getattr(layer, "position_embedding", None), getattr(layer.config, "max_positions", 0)
        if not isinstance(table, nn.Embedding) or rows <= num_tokens:
            raise UserError(
                f"`prefix_positions`: {type(layer).__name__} has no table of more than {num_tokens} learned positions; "
                f"leave it out"
            )
        table.num_before = num_tokens  # type: ignore[assignment]
        mix_in(table, PositionsBehind)
        layer.config = dataclasses.replace(layer.config, max_positions=rows - num_tokens)


class Prefix(nn.Module):
    """n keys and values of a layer, trained themselves, or made of rows [n, H] by two linear layers with a tanh.

    Li and Liang 2021 (4.3) make those of all layers by one network; here each layer has one, so that layers can be on
    ranks of their own.

    Args:
        num_tokens: n.
        num_rows: 2 K D.
        head_size: D.
        hidden_size: H.
        width: of the network; None: there is none.
        options: device and type.
    """

    def __init__(
        self,
        num_tokens: int,
        *,
        num_rows: int,
        head_size: int,
        hidden_size: int,
        width: int | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.head_size = head_size
        table = nn.Embedding(num_tokens, num_rows if width is None else hidden_size, **options)
        self.embedding = declare(table, weight=Normal(1.0))
        if width is not None:
            self.into = declare_as_torch(nn.Linear(hidden_size, width, **options), hidden_size)
            self.back = declare_as_torch(nn.Linear(width, num_rows, **options), width)

    def forward(self) -> Front:
        """Keys and values of all queries."""
        heads = self.rows().unflatten(-1, (-1, 2, self.head_size)).permute(2, 1, 0, 3)  # [2, K, n, D]
        return Front(*heads[:, None].unbind(0))

    def rows(self) -> Tensor:
        """For each token the key and the value of each head, [n, K 2 D]."""
        rows = self.embedding.weight
        return self.back(torch.tanh(self.into(rows))) if hasattr(self, "into") else rows  # type: ignore[no-any-return]


class PrefixedAttention(Adapted):
    """An `Attention` whose queries see the keys and values of a `Prefix`, too."""

    prefix: Prefix
    key_shape: tuple[int, int]

    def layer_attend(self, attend: Attend) -> Attend:
        """See `Attention.layer_attend`."""
        return attend_with_front(super().layer_attend(attend), self.prefix())  # type: ignore[misc]

    def precompute(self) -> None:
        if hasattr(self.prefix, "into"):
            rows = self.prefix.rows()
            self.prefix.embedding = nn.Embedding(rows.size(0), rows.size(1), _weight=rows.detach())
            del self.prefix.into, self.prefix.back

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        heads = {"units": self.key_shape[0], "unit_name": "key heads"}
        if not hasattr(self.prefix, "into"):
            return {"prefix.embedding": {"style": "row_part", **heads}}  # of its columns
        whole = {"style": "sharded", "own_random": False}  # of which each rank has a part of the gradient
        back = {"style": "column_part", **heads}
        return {"prefix.embedding": whole, "prefix.into": whole, "prefix.back": back}


class PositionsBehind(Adapted):
    """A table of positions of which the first are taken."""

    num_before: int
    num_embeddings: int

    def forward(self, position_ids: Tensor) -> Tensor:
        """position_ids [B, T] -> [B, T, H]

        Raises:
            UserError: T is more than the positions that are left.
        """
        left = self.num_embeddings - self.num_before
        if position_ids.size(-1) > left:
            raise UserError(
                f"sequence of {position_ids.size(-1)} tokens, but the prefix leaves {left} positions; shorten it"
            )
        return super().forward(position_ids + self.num_before)  # type: ignore[no-any-return]

    def parts_in_plan(self, style: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {}
