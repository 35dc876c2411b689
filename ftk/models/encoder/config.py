"""The options that encoders share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.models.config import TransformerConfig, activation_option, register_family, tie_option
from ftk.registry import Recipe


@dataclass(kw_only=True)
class EncoderConfig(TransformerConfig):
    """The shape of an encoder with an output layer for masked tokens.

    Attributes:
        pad_token: the padding token, which gets no position: positions start at pad_token + 1, as in fairseq; None:
            they start at 0.
        has_global_tokens: whether `global_mask` tells it which tokens see all others.
    """

    activation: str = activation_option("gelu")  # type: ignore[misc]
    tie_embeddings: bool = tie_option(True)  # type: ignore[misc]
    pad_token: ClassVar[int | None] = None
    has_global_tokens: ClassVar[bool] = False

    type_vocab_size: int = option(2, "number of token types (segments)", min=1, max=10**6)
    next_sentence: bool = option(False, "an output that tells whether the second part of a text follows the first")

    @property
    def first_position_row(self) -> int:
        """Row of position 0 in the table of positions."""
        return 0 if self.pad_token is None else self.pad_token + 1

    @property
    def head_activation(self) -> str:
        """Of the network in front of the output layer."""
        return self.activation

    @property
    def position_rows(self) -> int:
        """Rows of the table of positions."""
        return self.max_positions + self.first_position_row

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.pad_token is not None and not 0 <= self.pad_token < self.vocab_size:
            yield f"pad_token is {self.pad_token}; it must be a token of the vocabulary of {self.vocab_size}"


@dataclass(kw_only=True)
class PaddedEncoderConfig(EncoderConfig):
    """The same where positions are counted from the padding token on (Liu et al. 2019)."""

    type_vocab_size: int = option(1, "number of token types (segments)", min=1, max=10**6)
    pad_token: int = option(1, "padding token: it gets no position; positions start at pad_token + 1", min=0)  # type: ignore[misc]

    @property
    def head_activation(self) -> str:
        """Of the network in front of the output layer: the same in all models."""
        return "gelu"


def register_encoder(
    name: str, config_type: type[EncoderConfig], model: str = "ftk.models.encoder.model:Encoder", **common: Any
) -> Callable[..., None]:
    """`ftk.models.config.register_family` for encoders, which learn masked tokens."""
    return register_family(name, config_type, model, task="masked_lm", recipe=_recipe, **common)


def _recipe(hidden_size: int) -> Recipe:
    """RoBERTa's values (Liu et al. 2019, table 9); for width 64, of first tries, a larger rate and short samples."""
    lr = 3e-3 if hidden_size <= 64 else 6e-4 if hidden_size <= 768 else 4e-4
    return {
        "optimizer": {"_name": "adamw", "lr": lr, "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": 0.01},
        "lr_scheduler": {"_name": "linear", "warmup_ratio": 0.05},
        **({"task": {"_name": "masked_lm", "seq_length": 128}} if hidden_size <= 64 else {}),
    }
