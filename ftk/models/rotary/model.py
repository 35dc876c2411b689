"""A decoder with rotary positions: LLaMA (Touvron et al. 2023) and the families of its form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from ftk.models.base import Backbone
from ftk.models.flops import training_flops
from ftk.models.rotary.config import RotaryConfig
from ftk.modules.attention import Attend, Attention
from ftk.modules.dropout import Dropout
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.feed_forward import GatedFeedForward
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.norms import RMSNorm
from ftk.modules.rotary import Rope, RotaryAttention
from ftk.modules.transformer_layer import TransformerLayer


class RotaryDecoder(Backbone):
    """A causal language model: pre-norm layers with RMS norms, grouped key heads and gated feed-forward networks.

    Inputs: `position_ids` (None: 0 to T - 1); `document_ids`, where given a token sees only tokens with its own number.

    Args:
        config: of the family.
        seed: of the initial weights; the seed of torch's default generator if None. On the meta device none are
            drawn: after `to_empty`, `init_weights(seed)` gives the same values as direct construction.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "position_ids": "B T", "document_ids": "B T"}

    def __init__(self, config: RotaryConfig, seed: int | None = None) -> None:
        super().__init__(config)
        hidden_size, std, eps = config.hidden_size, config.init_std, config.layer_norm_eps
        spread = {"init_std": std, "output_std": std / math.sqrt(2.0 * config.num_layers)}
        embedding = TiedEmbedding if config.tie_embeddings else nn.Embedding
        self.token_embedding = declare(embedding(config.vocab_size, hidden_size), weight=Normal(std))
        self.embedding_dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                Attention(
                    hidden_size,
                    config.num_attention_heads,
                    num_kv_heads=config.kv_heads,
                    head_size=config.head_size,
                    bias=config.qkv_bias,
                    output_bias=config.output_bias,
                    head_norm_eps=eps if config.norms_heads else None,
                    **spread,
                ),
                GatedFeedForward(hidden_size, config.inner_size, **spread),
                lambda: RMSNorm(hidden_size, eps=eps),
                config.dropout,
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = RMSNorm(hidden_size, eps=eps)
        if not config.tie_embeddings:
            head = nn.Linear(hidden_size, config.vocab_size, bias=False)
            self.head = declare(head, weight=Normal(std))  # type: ignore[misc]  # `Backbone.head` finds it
        self.init_weights(seed)

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens [B, T] -> [B, T, H]; `position_ids` are for `around`."""
        return self.embedding_dropout(self.token_embedding(tokens))

    def attend(self, tokens: Tensor, document_ids: Tensor | None = None) -> Attend:
        """The attention of a whole sequence: tokens [B, T], document_ids [B, T] or None."""
        return self.sequence_attend(tokens, Visibility(documents=document_ids))

    def around(self, position_ids: Tensor, key_positions: Tensor | None = None) -> Callable[[Attend], Attend]:
        """The rotation of queries and keys at their places, int64 [B, T]."""
        config = self.config
        low, high = config.rope_turns
        rope = Rope(
            config.rope_theta,
            config.head_size,
            scaling=config.rope_scaling,
            factor=config.rope_factor,
            original_positions=config.rope_original_positions or config.max_positions,
            low=low,
            high=high,
            attention_factor=config.rope_attention_factor,
        )
        cos, sin = rope.tables(position_ids)  # once for all layers
        return lambda attend: RotaryAttention(attend, cos, sin, rope.interleaved)

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.final_norm(hidden)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """How ranks may share the layers, as data: `ftk.model_parallel.tensor_parallel.plan`."""
        config = self.config
        heads = {"units": config.kv_heads, "unit_name": "key heads"}
        norms = {"layers.*.attention.query_norm": "sharded", "layers.*.attention.key_norm": "sharded"}
        return {
            "token_embedding": "vocab_embedding",
            "embedding_dropout": "sequence",
            "layers.*.attention_norm": "sequence",
            "layers.*.attention": {"style": "sharded", "own_random": config.attention_dropout > 0.0},
            "layers.*.attention.qkv": {"style": "column", **heads},
            **(norms if config.norms_heads else {}),
            "layers.*.attention.output": {"style": "row", **heads},
            "layers.*.feed_forward_norm": "sequence",
            "layers.*.feed_forward.gate": "column",
            "layers.*.feed_forward.inner": "column",
            "layers.*.feed_forward.output": "row",
            "layers.*.dropout": "sequence",
            "final_norm": {"style": "sequence", "gather_output": True},
            **({} if config.tie_embeddings else {"head": "vocab_output"}),
        }

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Operations of a forward and a backward pass: `ftk.models.flops`."""
        return training_flops(self.config, num_tokens, num_targets, num_pairs)
