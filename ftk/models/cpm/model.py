"""CPM-1 of ModelCenter: a decoder whose positions are biases of attention scores; CPM-Ant has its layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ftk.models.cpm import CPM1Config
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attend, Attention
from ftk.modules.feed_forward import GatedFeedForward
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.norms import RMSNorm
from ftk.modules.position_bias import BiasedAttention, PositionBias


class BiasedDecoder(Transformer):
    """RMS norms, gated feed-forward networks, and one table of position biases for all layers.

    A family makes `position_bias` in `add_parts`.
    """

    ADDS_BIAS = True

    position_bias: PositionBias

    def attention(self) -> nn.Module:
        config = self.config
        return Attention(
            config.hidden_size,
            config.num_attention_heads,
            head_size=config.head_size,
            bias=False,
            output_bias=False,
            **self.spread,
        )

    def feed_forward(self) -> nn.Module:
        config = self.config
        return GatedFeedForward(config.hidden_size, config.inner_size, activation=config.activation, **self.spread)

    def norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, eps=self.config.layer_norm_eps)

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """The position bias: positions of queries [B or 1, T], of keys [B or 1, S] or None: the same."""
        bias = self.position_bias.between(position_ids, position_ids if key_positions is None else key_positions)
        return lambda attend: BiasedAttention(attend, bias, None)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `Transformer`, with columns of the position biases with their heads."""
        bias = {"style": "column", "transposed": True, **self.shared_heads}
        return {**super().tensor_parallel_plan, "position_bias": bias}


class CPM1(BiasedDecoder):
    """A decoder that may see a context whole, and continues it (ModelCenter's `model_center/model/cpm1.py`).

    Inputs: `position_ids` (None: 0 to T - 1); `document_ids`, where given a token sees only tokens with its own number;
    `context_length`, leading tokens that all tokens see (None: 0).

    Args:
        config: the shape.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {
        "tokens": "B T",
        "position_ids": "B T",
        "document_ids": "B T",
        "context_length": "B",
    }
    POSITION_TABLES = None

    def __init__(self, config: CPM1Config, seed: int | None = None) -> None:
        super().__init__(config, None, seed)

    def add_parts(self) -> None:
        config = self.config
        shape = (config.num_position_buckets, config.num_attention_heads, config.max_position_distance)
        self.position_bias = declare(PositionBias(*shape, bidirectional=True), weight=Normal(config.init_std))

    def attend(  # type: ignore[override]
        self, tokens: Tensor, document_ids: Tensor | None = None, context_length: Tensor | None = None
    ) -> Attend:
        """The attention of a whole sequence: tokens [B, T], document_ids [B, T] or None, context_length [B] or None."""
        return self.sequence_attend(tokens, Visibility(prefix=context_length, documents=document_ids))
