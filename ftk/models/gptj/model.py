"""GPT-J: parallel residual paths, and positions that rotate a part of each head."""

from __future__ import annotations

from typing import Any

from torch import nn

from ftk.models.rotary.model import RotaryTransformer
from ftk.modules.attention import Attention
from ftk.modules.embeddings import LogitsBias
from ftk.modules.heads import BiasedVocabulary, Head
from ftk.modules.rotary import Rope
from ftk.modules.transformer_layer import ParallelLayer


class GPTJ(RotaryTransformer):
    """GPT-J (https://github.com/kingoflolz/mesh-transformer-jax); its output layer has a bias."""

    HEAD_BIAS = True
    layer_form = ParallelLayer

    def add_parts(self) -> None:
        if self.config.tie_embeddings:
            self.logits_bias = LogitsBias(self.config.vocab_size, trained=True)

    @property
    def head(self) -> Head:  # type: ignore[override]
        """A matrix with a bias, or the token embedding with one."""
        if not self.config.tie_embeddings:
            return super().head
        return BiasedVocabulary(self.token_embedding, self.logits_bias)  # type: ignore[arg-type]

    def attention(self) -> nn.Module:
        config = self.config
        return Attention(config.hidden_size, config.num_attention_heads, bias=False, output_bias=False, **self.spread)

    @property
    def rope(self) -> Rope:  # type: ignore[override]
        return Rope(10000.0, self.config.rotary_dim, interleaved=True)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `Transformer`; the bias alone is whole on each rank."""
        return {**super().tensor_parallel_plan, **({"logits_bias": "replicated"} if self.config.tie_embeddings else {})}
