"""Transformers with rotary positions: what GPT-J and LLaMA share, and LLaMA's form (Touvron et al. 2023)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from ftk.errors import UserError
from ftk.models.config import TransformerConfig
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attend, Attention, wrapped
from ftk.modules.feed_forward import GatedFeedForward
from ftk.modules.norms import RMSNorm
from ftk.modules.rotary import Rope, RotaryAttention


class RotaryTransformer(Transformer):
    """A causal language model without tables of positions: queries and keys are rotated. A family gives `rope`.

    Inputs: `position_ids` (None: 0 to T - 1); `document_ids`, where given a token sees only tokens with its own number.

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "position_ids": "B T", "document_ids": "B T"}
    POSITION_TABLES = None

    rope: Rope

    def __init__(self, config: TransformerConfig, seed: int | None = None) -> None:
        super().__init__(config, None, seed)

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """The rotation of queries and keys at their places, int64 [B, T]."""
        rope = self.rope
        cos, sin = rope.tables(position_ids)  # once for all layers
        return lambda attend: wrapped(attend, lambda one: RotaryAttention(one, cos, sin, rope.interleaved))


class RotaryDecoder(RotaryTransformer):
    """LLaMA's form: RMS norms, grouped key heads and gated feed-forward networks."""

    def attention(self) -> nn.Module:
        config = self.config
        return Attention(
            config.hidden_size,
            config.num_attention_heads,
            num_kv_heads=config.kv_heads,
            head_size=config.head_size,
            bias=config.qkv_bias,
            output_bias=config.output_bias,
            head_norm_eps=config.layer_norm_eps if config.norms_heads else None,
            **self.spread,
        )

    def feed_forward(self) -> nn.Module:
        config = self.config
        return GatedFeedForward(config.hidden_size, config.inner_size, bias=config.mlp_bias, **self.spread)

    def norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)

    @property
    def rope(self) -> Rope:  # type: ignore[override]
        config = self.config
        low, high = config.rope_turns
        return Rope(
            config.rope_theta,
            config.rotary_size,
            config.interleaved,
            scaling=config.rope_scaling,
            factor=config.rope_factor,
            original_positions=config.rope_original_positions or config.max_positions,
            low=low,
            high=high,
            attention_factor=config.rope_attention_factor,
            whole_pairs=config.rope_whole_pairs,
        )

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """As of `RotaryTransformer`.

        Raises:
            UserError: more tokens than max_positions, with angles that depend on their number from there on.
        """
        config, num_tokens = self.config, position_ids.size(-1)
        if config.rope_scaling == "dynamic" and num_tokens > config.max_positions:
            raise UserError(
                f"sequence of {num_tokens} tokens, but with `rope_scaling` dynamic ftk reads up to `max_positions`, "
                f"{config.max_positions}; shorten the sequence"
            )
        return super().around(position_ids, key_positions)
