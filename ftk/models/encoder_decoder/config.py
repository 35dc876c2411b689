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
    activation_dropout: float = option(0.0, "dropout behind the activation of the feed-forward network", "[0, 1)")
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
    def decoder_multiplications(self) -> int:
        """Of one token of the decoder in one of its layers, which has queries and outputs of a second attention."""
        return self.layer_multiplications + 2 * self.hidden_size * self.num_attention_heads * self.head_size

    @property
    def position_limit(self) -> int | None:
        """Most tokens of either side; None: positions are no rows of a table."""
        return self.max_positions

    def validate(self) -> Iterator[str]:
        """One message for each value that is not allowed."""
        yield from super().validate()
        for name in ("decoder_start_token", "forced_first_token"):
            token = getattr(self, name)
            if token is not None and not 0 <= token < self.vocab_size:
                yield f"{name} is {token}; it must be a token of the vocabulary of {self.vocab_size}, or not given"
