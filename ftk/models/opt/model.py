"""OPT: GPT-2's form with ReLU, and in one size with post-norm layers and a narrow token embedding.

OPT was trained in a fork of fairseq: with waves of positions it is fairseq's language model, `transformer_lm`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

from torch import Tensor, nn

from ftk.models.opt import OPTConfig
from ftk.models.transformer import Transformer
from ftk.modules.attention import Attention
from ftk.modules.embeddings import PositionEmbedding, PositionWaves
from ftk.modules.feed_forward import FeedForward
from ftk.modules.initialization import Normal, declare
from ftk.modules.transformer_layer import PostNormLayer, TransformerLayer


class OPT(Transformer):
    """A causal language model (Zhang et al. 2022, https://arxiv.org/abs/2205.01068).

    Inputs: `position_ids` (None: 0 to T - 1); `document_ids`, where given a token sees only tokens with its own number.

    Args:
        config: the shape.
        seed: of the initial weights, as of `Transformer`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "position_ids": "B T", "document_ids": "B T"}

    def __init__(self, config: OPTConfig, seed: int | None = None) -> None:
        first = config.first_position_row
        positions: nn.Module = PositionWaves(config.hidden_size, first)
        if config.learned_positions:
            table = PositionEmbedding(config.max_positions, config.hidden_size, first)
            positions = declare(table, weight=Normal(config.init_std))
        super().__init__(config, positions, seed)

    def add_parts(self) -> None:
        config, normal = self.config, Normal(self.config.init_std)
        if self._projects:
            into = nn.Linear(config.embedding_size, config.hidden_size, bias=False)
            back = nn.Linear(config.hidden_size, config.embedding_size, bias=False)
            self.project_in, self.project_out = declare(into, weight=normal), declare(back, weight=normal)

    @property
    def layer_form(self) -> type[TransformerLayer]:  # type: ignore[override]  # in other families one class for all sizes
        return TransformerLayer if self.config.norm_first else PostNormLayer

    def attention(self) -> nn.Module:
        bias = self.config.bias
        return Attention(
            self.config.hidden_size, self.config.num_attention_heads, bias=bias, output_bias=bias, **self.spread
        )

    def feed_forward(self) -> nn.Module:
        config = self.config
        options = {"activation": config.activation, "bias": config.bias, **self.spread}
        return FeedForward(config.hidden_size, config.inner_size, **options)

    def norm(self) -> nn.Module:
        config = self.config
        return nn.LayerNorm(config.hidden_size, config.layer_norm_eps, elementwise_affine=config.norm_weights)

    @property
    def _projects(self) -> bool:
        return self.config.embedding_size != self.config.hidden_size

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        embedded = self.token_embedding(tokens)  # [B, T, W]
        if self.config.scale_embeddings:
            embedded = embedded * math.sqrt(self.config.hidden_size)
        return self.project_in(embedded) if self._projects else embedded

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., W], W the width of the token embedding"""
        hidden = self.final_norm(hidden)
        return self.project_out(hidden) if self._projects else hidden

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `Transformer`; the projections are whole on each rank, the second behind the gathered sequence."""
        projection = {"project_in": "sequence", "project_out": "replicated"} if self._projects else {}
        return {**super().tensor_parallel_plan, **projection}

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """That of `Transformer`, with the projections."""
        size = self.config.embedding_size * self.config.hidden_size if self._projects else 0
        return super().training_flops(num_tokens, num_targets, num_pairs) + 6 * (num_tokens + num_targets) * size
