"""GPT-2: a pre-norm transformer whose tokens see what stands before them."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.models.base import Backbone
from ftk.models.flops import training_flops
from ftk.models.gpt2 import GPT2Config
from ftk.modules.attention import Attend
from ftk.modules.dropout import Dropout
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.initialization import Normal, declare
from ftk.modules.masks import Visibility
from ftk.modules.transformer_layer import TransformerLayer


class GPT2(Backbone):
    """A causal language model with learned positions (Radford et al. 2019).

    Inputs: `position_ids` (None: 0 to T - 1); `document_ids`, where given a token sees only tokens with its own number.

    Args:
        config: the shape.
        seed: of the initial weights, as of `Backbone.init_weights`.
    """

    INPUTS: ClassVar[dict[str, str]] = {"tokens": "B T", "position_ids": "B T", "document_ids": "B T"}

    def __init__(self, config: GPT2Config, seed: int | None = None) -> None:
        super().__init__(config)
        std = config.init_std
        self.token_embedding = declare(TiedEmbedding(config.vocab_size, config.hidden_size), weight=Normal(std))
        self.position_embedding = declare(nn.Embedding(config.max_positions, config.hidden_size), weight=Normal(std))
        self.embedding_dropout = Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(
            TransformerLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.inner_size,
                config.dropout,
                config.layer_norm_eps,
                init_std=std,
                output_std=std / math.sqrt(2.0 * config.num_layers),
            )
            for _ in range(config.num_layers)
        )
        self.final_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.init_weights(seed)

    def embed(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """tokens [B, T], position_ids [B, T] or None -> [B, T, H]

        Raises:
            UserError: without position_ids, if T is more than max_positions.
        """
        if position_ids is None:
            if tokens.size(1) > self.config.max_positions:
                raise UserError(
                    f"sequence of {tokens.size(1)} tokens, but max_positions is {self.config.max_positions}"
                )
            position_ids = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        return self.embedding_dropout(self.token_embedding(tokens) + self.position_embedding(position_ids))

    def attend(self, tokens: Tensor, document_ids: Tensor | None = None) -> Attend:
        """The attention of a whole sequence: tokens [B, T], document_ids [B, T] or None."""
        return self.sequence_attend(tokens, Visibility(documents=document_ids))

    def finish(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., H]"""
        return self.final_norm(hidden)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """How ranks may share the layers (Shoeybi et al. 2019), as data: `ftk.model_parallel.tensor_parallel.plan`."""
        heads = {"units": self.config.num_attention_heads, "unit_name": "attention heads"}
        return {
            "token_embedding": "vocab_embedding",
            "position_embedding": {"style": "sequence", "scatter_input": True},
            "embedding_dropout": "sequence",
            "layers.*.attention_norm": "sequence",
            "layers.*.attention": {"style": "sharded", "own_random": self.config.attention_dropout > 0.0},
            "layers.*.attention.qkv": {"style": "column", **heads},
            "layers.*.attention.output": {"style": "row", **heads},
            "layers.*.feed_forward_norm": "sequence",
            "layers.*.feed_forward.inner": "column",
            "layers.*.feed_forward.output": "row",
            "layers.*.dropout": "sequence",
            "final_norm": {"style": "sequence", "gather_output": True},
        }

    def training_flops(self, num_tokens: int, num_targets: int, num_pairs: int) -> int:
        """Operations of a forward and a backward pass: `ftk.models.flops`."""
        return training_flops(self.config, num_tokens, num_targets, num_pairs)
