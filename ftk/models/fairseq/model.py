"""The Transformer of Vaswani et al. (2017) as fairseq has it: waves of positions, and embeddings that may be shared."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ftk.models.encoder_decoder.model import EncoderDecoder, Stack
from ftk.modules.embeddings import PositionWaves
from ftk.modules.feed_forward import FeedForward
from ftk.modules.initialization import Normal, declare
from ftk.modules.transformer_layer import DecoderLayer, PostNormDecoderLayer, PostNormLayer, TransformerLayer


class FairseqTransformer(EncoderDecoder):
    """An encoder-decoder for translation (Vaswani et al. 2017, Ott et al. 2019); inputs as of `EncoderDecoder`.

    Initial weights have the variances of fairseq's (Glorot and Bengio 2010), drawn from a normal distribution.

    Args:
        config: of the family.
        seed: of the initial weights, as of `Transformer`.
    """

    @property
    def layer_form(self) -> type[TransformerLayer]:  # type: ignore[override]
        return TransformerLayer if self.config.norm_first else PostNormLayer

    @property
    def decoder_layer_form(self) -> type[DecoderLayer]:  # type: ignore[override]
        return DecoderLayer if self.config.norm_first else PostNormDecoderLayer

    def add_parts(self) -> None:
        config = self.config
        self.position_waves = PositionWaves(config.hidden_size, config.first_position)
        normal = Normal(config.init_std * config.hidden_size**-0.5)
        if config.share_embeddings != "all":
            self.source_embedding = declare(nn.Embedding(config.source_rows, config.hidden_size), weight=normal)
        declare(self.token_embedding, weight=normal)
        if config.share_embeddings == "none":
            declare(self.head, weight=normal)  # type: ignore[type-var]

    @property
    def spread(self) -> dict[str, Any]:
        """Standard deviations of the initial weights of an attention's parts."""
        size = self.config.hidden_size
        # fairseq draws queries, keys and values as if each had three times as many outputs.
        return {"init_std": self._glorot_std(size, 3 * size), "output_std": self._glorot_std(size, size)}

    def embedded(self, stack: Stack, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """As of `EncoderDecoder`; positions have no last one."""
        config, own = self.config, self._modules.get("source_embedding")
        table: Any = self.token_embedding if own is None or stack is self.decoder else own
        hidden = table(tokens)
        if config.scale_embeddings:
            hidden = hidden * math.sqrt(config.hidden_size)
        positions = self.default_positions(tokens[:1]) if position_ids is None else position_ids
        waves = self.position_waves(positions)
        return self.embedding_dropout(hidden + waves.to(hidden.dtype))

    @property
    def tensor_parallel_plan(self) -> dict[str, str | dict[str, Any]]:
        """That of `EncoderDecoder`, with the source's embedding and the waves of positions."""
        source = {} if self.config.share_embeddings == "all" else {"source_embedding": "vocab_embedding"}
        waves = {"style": "sequence", "scatter_input": True}
        return {**super().tensor_parallel_plan, **source, "position_waves": waves}

    def network(self, inner_size: int) -> nn.Module:
        config = self.config
        std = self._glorot_std(config.hidden_size, inner_size)
        options = {"activation": config.activation, "dropout": config.activation_dropout}
        return FeedForward(config.hidden_size, inner_size, **options, init_std=std, output_std=std)

    def _glorot_std(self, inputs: int, outputs: int) -> float:
        return float(self.config.init_std * math.sqrt(2.0 / (inputs + outputs)))
