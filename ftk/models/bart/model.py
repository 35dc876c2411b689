"""BART: an encoder-decoder with norms behind the sums and learned positions."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ftk.models.encoder_decoder.model import EncoderDecoder, Stack
from ftk.modules.embeddings import LogitsBias, PositionEmbedding
from ftk.modules.heads import BiasedVocabulary, Head, TiedVocabulary
from ftk.modules.initialization import Normal, declare
from ftk.modules.transformer_layer import PostNormDecoderLayer, PostNormLayer


class BART(EncoderDecoder):
    """An encoder-decoder (Lewis et al. 2020, https://arxiv.org/abs/1910.13461); inputs as of `EncoderDecoder`.

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    OUTPUT_LAYER = "output_layer"
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
        config = self.config
        if config.logits_bias:
            self.logits_bias = LogitsBias(config.vocab_size, trained=False)
        if not config.tie_embeddings:  # `transformers` unties the two stacks then, too
            source = nn.Embedding(config.vocab_size, config.hidden_size)
            self.source_embedding = declare(source, weight=Normal(config.init_std))

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
        own: Any = self._modules.get("source_embedding") if stack is self.encoder else None
        hidden = self.embed_tokens(tokens) if own is None else own(tokens)
        if self.config.scale_embeddings:
            hidden = hidden * math.sqrt(self.config.hidden_size)
        return self.embedding_dropout(parts.embedding_norm(hidden + parts.position_embedding(position_ids)))

    @property
    def head(self) -> Head:  # type: ignore[override]
        """The token embedding or a matrix of its own, with a bias where there is one."""
        output: Any = self.token_embedding if self.config.tie_embeddings else self.output_layer
        if self.config.logits_bias:
            return BiasedVocabulary(output, self.logits_bias)
        return TiedVocabulary(output) if self.config.tie_embeddings else output

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `EncoderDecoder`, with the tables of positions; the bias of the logits is whole on each rank."""
        source = {} if self.config.tie_embeddings else {"source_embedding": "vocab_embedding"}
        return {
            **super().tensor_parallel_plan,
            **source,
            "stacks.*.position_embedding": {"style": "sequence", "scatter_input": True},
            "stacks.*.embedding_norm": "sequence",
        }
