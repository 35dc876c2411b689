"""The options that encoder-decoders share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ftk.config.options import option
from ftk.models.config import TransformerConfig


@dataclass(kw_only=True)
class EncoderDecoderConfig(TransformerConfig):
    """The shape of an encoder and a decoder and their dropout."""

    num_layers: int = option(6, "transformer layers of the encoder", min=1, max=10**4)
    num_decoder_layers: int | None = option(
        None, "transformer layers of the decoder; num_layers if not given", min=1, max=10**4
    )
    activation_dropout: float = option(0.0, "dropout after the activation of the feed-forward network", "[0, 1)")
    decoder_start_token: int | None = option(
        None, "id of the token in front of what the decoder reads; the task's in training", max=10**8, derived=True
    )
    forced_first_token: int | None = option(
        None, "id of the token that every answer begins with; none if not given", max=10**8
    )

    @property
    def decoder_layers(self) -> int:
        """Layers of the decoder."""
        return self.num_layers if self.num_decoder_layers is None else self.num_decoder_layers

    @property
    def decoder_inner_size(self) -> int:
        """Inner width of the decoder's feed-forward networks."""
        return self.inner_size

    @property
    def decoder_heads(self) -> int:
        """Attention heads of the decoder, of its attention to the encoder too."""
        return self.num_attention_heads

    @property
    def decoder_multiplications(self) -> int:
        """Of one token of the decoder in one of its layers, which has queries and outputs of a second attention."""
        return self.layer_multiplications + 2 * self.hidden_size * self.num_attention_heads * self.head_size

    @property
    def position_limit(self) -> int | None:
        """Most tokens of either side; None: positions are no rows of a table."""
        return self.max_positions

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        for name in ("decoder_start_token", "forced_first_token"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                yield f"{name} is {token}; it must be a token of the vocabulary of {self.vocab_size}, or not given"


@dataclass(kw_only=True)
class FreeDecoderConfig(EncoderDecoderConfig):
    """The same where the decoder may have another inner width and other heads than the encoder."""

    decoder_ffn_hidden_size: int | None = option(
        None, "ffn_hidden_size of the decoder; that of the encoder if not given", min=1, max=10**7
    )
    num_decoder_attention_heads: int | None = option(
        None,
        "attention heads of the decoder; must divide hidden_size; num_attention_heads if not given",
        min=1,
        max=10**5,
    )

    @property
    def decoder_inner_size(self) -> int:
        """Inner width of the decoder's feed-forward networks."""
        return self.inner_size if self.decoder_ffn_hidden_size is None else self.decoder_ffn_hidden_size

    @property
    def decoder_heads(self) -> int:
        """Attention heads of the decoder, of its attention to the encoder too."""
        return self.num_decoder_attention_heads or self.num_attention_heads

    @property
    def decoder_multiplications(self) -> int:
        """Of one token of the decoder in one of its layers."""
        return super().decoder_multiplications + 2 * self.hidden_size * (self.decoder_inner_size - self.inner_size)

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        heads = self.num_decoder_attention_heads
        if heads is not None and self.hidden_size % heads:
            yield f"num_decoder_attention_heads is {heads}; it must divide hidden_size {self.hidden_size}"
