"""The options that encoder-decoders share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ftk.models.config import TransformerConfig


@dataclass(kw_only=True)
class EncoderDecoderConfig(TransformerConfig):
    """The shape of an encoder and a decoder and their dropout."""

    num_layers: int = field(default=6, metadata={"max": 10**4, "help": "transformer layers of the encoder"})
    num_decoder_layers: int | None = field(
        default=None,
        metadata={"min": 1, "max": 10**4, "help": "transformer layers of the decoder; num_layers if not given"},
    )

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def decoder_multiplications(self) -> int:
        """Of one token of the decoder in one of its layers, which has queries and outputs of a second attention."""
        return self.layer_multiplications + 2 * self.hidden_size * self.num_attention_heads * self.head_size
