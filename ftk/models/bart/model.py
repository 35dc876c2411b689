"""BART: an encoder-decoder with norms behind the sums and learned positions."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.models.encoder_decoder.model import EncoderDecoder, Stack
from ftk.modules.embeddings import PositionEmbedding, TiedEmbedding
from ftk.modules.heads import Head, TiedVocabulary
from ftk.modules.initialization import Constant, Normal, declare
from ftk.modules.transformer_layer import PostNormDecoderLayer, PostNormLayer


class BART(EncoderDecoder):
    """An encoder-decoder (Lewis et al. 2020, https://arxiv.org/abs/1910.13461); inputs as of `EncoderDecoder`.

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    layer_form = PostNormLayer
    decoder_layer_form = PostNormDecoderLayer

    def add_layers(self) -> None:
        super().add_layers()
        config = self.config
        for stack in self.stacks.values():
            table = PositionEmbedding(config.max_positions, config.hidden_size, config.first_position_row)
            stack.position_embedding = declare(table, weight=Normal(config.init_std))
            stack.embedding_norm = self.norm()

    def add_parts(self) -> None:
        if self.config.logits_bias:
            self.logits_bias = LogitsBias(self.config.vocab_size)

    @property
    def spread(self) -> dict[str, Any]:
        """Standard deviations of the initial weights of a layer's parts: one, as BERT's."""
        return {"init_std": self.config.init_std, "output_std": self.config.init_std}

    def embedded(self, stack: Stack, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """As of `EncoderDecoder`.

        Raises:
            UserError: without position_ids, if T is more than max_positions.
        """
        parts: Any = stack
        if position_ids is None:
            self.check_length(tokens)
            position_ids = self.default_positions(tokens)
        hidden = self.embed_tokens(tokens)
        if self.config.scale_embeddings:
            hidden = hidden * math.sqrt(self.config.hidden_size)
        return self.embedding_dropout(parts.embedding_norm(hidden + parts.position_embedding(position_ids)))

    @property
    def head(self) -> Head:  # type: ignore[override]
        """The token embedding, with a bias where there is one."""
        embedding: Any = self.token_embedding
        return BiasedVocabulary(embedding, self.logits_bias) if self.config.logits_bias else TiedVocabulary(embedding)

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `EncoderDecoder`, with the tables of positions; the bias of the logits is whole on each rank."""
        return {
            **super().tensor_parallel_plan,
            "stacks.*.position_embedding": {"style": "sequence", "scatter_input": True},
            "stacks.*.embedding_norm": "sequence",
        }


class LogitsBias(nn.Module):
    """A number for each token, which is kept and not trained."""

    bias: Tensor

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(vocab_size))
        declare(self, bias=Constant(0.0))

    def forward(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> [..., V]"""
        return logits + self.bias


class BiasedVocabulary(NamedTuple):
    """The token embedding and a bias as the output layer: no single matrix, so that `weight` is None."""

    embedding: TiedEmbedding
    bias: LogitsBias

    @property
    def weight(self) -> None:
        """None, see `ftk.modules.heads.Head`."""

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> logits [..., V]"""
        return self.bias(self.embedding.logits(hidden))  # type: ignore[no-any-return]
