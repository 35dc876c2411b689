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
