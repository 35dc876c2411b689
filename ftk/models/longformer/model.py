"""Longformer: an encoder whose tokens see a window, and global tokens that see all and are seen by all."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ftk.models.encoder.model import Encoder
from ftk.modules.attention import Attend, Attention
from ftk.modules.initialization import Normal, declare
from ftk.modules.masked_attention import fused_attention
from ftk.modules.masks import Visibility, marked_places


class Longformer(Encoder):
    """An `Encoder` with windows (Beltagy et al. 2020).

    Inputs: those of `Encoder`; `global_mask`, not 0 for global tokens (None: there are none, and the projections of
    their own are not used).
    """

    INPUTS: ClassVar[dict[str, str]] = {**Encoder.INPUTS, "global_mask": "B T"}
    STARTS_AS: ClassVar[dict[str, str | None]] = {**Encoder.STARTS_AS, "attention.qkv_global.": "attention.qkv."}

    def attention(self) -> nn.Module:
        return GlobalAttention(self.config.hidden_size, self.config.num_attention_heads, **self.spread)

    def attend(  # type: ignore[override]
        self, tokens: Tensor, lengths: Tensor | None = None, global_mask: Tensor | None = None
    ) -> Attend:
        """The attention of whole texts: tokens, global_mask [B, T], lengths [B]."""
        near = self.sequence_attend(tokens, Visibility(causal=False, length=lengths, global_keys=global_mask))
        if global_mask is None:
            return near
        places = torch.arange(tokens.size(1), device=tokens.device)
        seen = None if lengths is None else (places < lengths[:, None].clamp(min=1))[:, None, None]
        dropout = self.config.attention_dropout if self.training else 0.0
        is_global = (global_mask != 0)[:, None, :, None]
        return GlobalAttend(near, marked_places(global_mask), is_global, seen, dropout)

    def layers_plan(self, layer: str, heads: dict[str, Any] | None = None) -> dict[str, str | dict[str, Any]]:
        """That of `Transformer`, with the projections of global tokens."""
        plan = super().layers_plan(layer, heads)
        return {**plan, f"{layer}.attention.qkv_global": plan[f"{layer}.attention.qkv"]}


class GlobalAttention(Attention):
    """`Attention` with a second joint projection, by which global tokens see all."""

    def __init__(self, hidden_size: int, num_heads: int, *, init_std: float, output_std: float) -> None:
        super().__init__(hidden_size, num_heads, init_std=init_std, output_std=output_std)
        self.qkv_global = declare(nn.Linear(hidden_size, 3 * hidden_size), weight=Normal(init_std))

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]; `attend` is a `GlobalAttend` where there are global tokens."""
        near = attend.near if isinstance(attend, GlobalAttend) else attend
        attended = self.layer_attend(near)(*self.heads(self.qkv(hidden)))  # [B, A, T, D]
        if isinstance(attend, GlobalAttend):
            attended = attend.replaced(attended, *self.heads(self.qkv_global(hidden)))
        return self.output(attended.transpose(1, 2).flatten(2))


class GlobalAttend(NamedTuple):
    """What layers are given where there are global tokens.

    Attributes:
        near: of all tokens, with windows.
        places: int64 [B, G], those of the global tokens, and of others in rows that have fewer.
        is_global: bool [B, 1, T, 1].
        seen: bool [B, 1, 1, T], True for what is no padding; None: all.
        dropout: as in `MaskedAttention`.
    """

    near: Attend
    places: Tensor
    is_global: Tensor
    seen: Tensor | None
    dropout: float

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        return self.near(query, key, value, bias=bias, scale=scale)

    def replaced(self, attended: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """attended [B, A, T, D] with what global tokens see in place of theirs; query, key, value as of `Attend`."""
        places = self.places[:, None, :, None].expand(-1, query.size(1), -1, query.size(3))  # [B, A, G, D]
        found = fused_attention(query.gather(2, places), key, value, self.seen, dropout=self.dropout)
        return torch.where(self.is_global, attended.scatter(2, places, found.to(attended.dtype)), attended)
