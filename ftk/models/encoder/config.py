"""The options that encoders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ftk.models.config import TransformerConfig, register_family


@dataclass(kw_only=True)
class EncoderConfig(TransformerConfig):
    """The shape of an encoder with an output layer for hidden tokens.

    Attributes:
        pad_token: the token whose places are not counted, if there is one; places are counted from the number behind
            it on, as in fairseq.
    """

    activation: ClassVar[str] = "gelu"
    pad_token: ClassVar[int | None] = None

    type_vocab_size: int = field(
        default=2, metadata={"min": 1, "max": 10**6, "help": "kinds of text that tokens can be of (`token_types`)"}
    )
    next_sentence: bool = field(
        default=False, metadata={"help": "an output that tells whether the second part of a text follows the first"}
    )

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions."""
        return self.max_positions + (0 if self.pad_token is None else self.pad_token + 1)

    def validate(self) -> Iterator[str]:
        """One message for each value that is not allowed."""
        yield from super().validate()
        if self.pad_token is not None and not 0 <= self.pad_token < self.vocab_size:
            yield f"pad_token is {self.pad_token}; it must be a token of the vocabulary of {self.vocab_size}"


def register_encoder(name: str, config_type: type[EncoderConfig], **common: Any) -> Callable[..., None]:
    """`ftk.models.config.register_family` for encoders, which learn hidden tokens."""
    return register_family(name, config_type, "ftk.models.encoder.model:Encoder", task="masked_lm", **common)
