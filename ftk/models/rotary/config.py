"""The options that decoders with rotary positions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.models.config import TransformerConfig, register_family, tie_option


@dataclass(kw_only=True)
class RotaryConfig(TransformerConfig):
    """The shape of a decoder with rotary positions, RMS norms and gated feed-forward networks.

    Attributes:
        qkv_bias, output_bias, mlp_bias: whether the projections of attention, and the matrices of feed-forward
            networks, have biases; a family may make options of them.
        norms_heads: whether query and key heads are normalised.
        interleaved: whether the pairs of dimensions that are rotated are (2i, 2i + 1); else (i, i + R/2).
    """

    qkv_bias: ClassVar[bool] = False
    output_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False
    norms_heads: ClassVar[bool] = False
    interleaved: ClassVar[bool] = False
    gated: ClassVar[bool] = True  # type: ignore[misc]

    num_kv_heads: int | None = option(
        None,
        "key heads, each of which serves as many query heads; must divide num_attention_heads, which it is "
        "if not given",
        min=1,
        max=10**5,
    )
    head_dim: int | None = option(
        None, "size of a head; hidden_size / num_attention_heads if not given", min=2, max=10**5
    )
    tie_embeddings: bool = tie_option(False)  # type: ignore[misc]
    embedding_dropout: float = option(0.0, "dropout of the token embeddings", "[0, 1)")
    attention_dropout: float = option(0.0, "dropout of attention weights", "[0, 1)")
    dropout: float = option(0.0, "dropout of each attention and feed-forward output", "[0, 1)")
    rope_theta: float = option(10000.0, "base of the rotary wavelengths", min=1)
    rope_scaling: str = option(
        "none",
        "how rotary positions are stretched for texts longer than those of the pretraining; dynamic: only "
        "beyond max_positions, where ftk stops",
        choices=("none", "linear", "dynamic", "llama3", "yarn"),
    )
    rope_factor: float = option(
        1.0,
        "how much longer, for `rope_scaling`",
        needs={"rope_scaling": ("linear", "dynamic", "llama3", "yarn")},
        min=1,
    )
    rope_original_positions: int | None = option(
        None,
        "longest text of the pretraining, for llama3 and yarn; max_positions if not given",
        needs={"rope_scaling": ("llama3", "yarn")},
        min=1,
        unit="tokens",
    )
    rope_low: float = option(
        1.0,
        "llama3's low_freq_factor, yarn's beta_slow: fewer turns are stretched fully",
        needs={"rope_scaling": ("llama3", "yarn")},
    )
    rope_high: float | None = option(
        None,
        "llama3's high_freq_factor, yarn's beta_fast: more turns are not stretched; 4 and 32 if not given",
        needs={"rope_scaling": ("llama3", "yarn")},
    )
    rope_attention_factor: float | None = option(
        None, "factor of yarn's cosines and sines; 0.1 ln(rope_factor) + 1 if not given", needs={"rope_scaling": "yarn"}
    )
    rope_whole_pairs: bool = option(
        True,
        "round the range of the pairs of dimensions that yarn interpolates to whole pairs",
        needs={"rope_scaling": "yarn"},
    )

    @property
    def kv_heads(self) -> int:
        """K: key heads."""
        return self.num_attention_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def rotary_size(self) -> int:
        """R: leading dimensions of a head that are rotated."""
        return self.head_size

    @property
    def rope_turns(self) -> tuple[float, float]:
        """`rope_low` and `rope_high`."""
        usual = 32.0 if self.rope_scaling == "yarn" else 4.0
        return self.rope_low, usual if self.rope_high is None else self.rope_high

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.num_attention_heads % self.kv_heads:
            yield f"num_kv_heads is {self.num_kv_heads}; it must divide num_attention_heads {self.num_attention_heads}"
        elif self.head_size % 2:
            yield f"the size of a head is {self.head_size}; rotary positions need an even one"
        low, high = self.rope_turns
        if self.rope_scaling in ("llama3", "yarn") and not 0.0 < low < high:
            yield f"rope_low is {low}; it must be above 0 and below rope_high {high}"
        if self.rope_scaling == "yarn" and self.rope_theta == 1.0:
            yield "rope_theta is 1, with which yarn has no wavelengths; it must be above 1"


@dataclass(kw_only=True)
class BiasedRotaryConfig(RotaryConfig):
    """The same where the biases of attention are an option."""

    attention_bias: bool = option(False, "biases in the four projections of attention")

    @property
    def qkv_bias(self) -> bool:  # type: ignore[override]
        """Of the joint projection."""
        return self.attention_bias

    @property
    def output_bias(self) -> bool:  # type: ignore[override]
        """Of the output projection."""
        return self.attention_bias


@dataclass(kw_only=True)
class WindowedRotaryConfig(RotaryConfig):
    """The same where tokens may see those of a window alone."""

    sliding_window: int | None = option(
        None,
        "tokens that a token sees up to itself, itself included; all if not given",
        min=1,
        max=10**8,
        unit="tokens",
    )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """See `TransformerConfig`."""
        return (self.sliding_window,) * self.num_layers


@dataclass(kw_only=True)
class MixedWindowRotaryConfig(WindowedRotaryConfig):
    """The same where some layers may have the window, and others none."""

    windowed_layers: list[int] | None = option(
        None, "numbers of the layers that have the window, from 0; all if not given"
    )

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """See `TransformerConfig`."""
        layers = range(self.num_layers)
        windowed = layers if self.windowed_layers is None else self.windowed_layers
        return tuple(self.sliding_window if number in windowed else None for number in layers)

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        for number in self.windowed_layers or ():
            if not 0 <= number < self.num_layers:
                yield f"windowed_layers has {number}; layers have the numbers 0 to {self.num_layers - 1}"
        if self.windowed_layers and self.sliding_window is None:
            yield "windowed_layers is given without sliding_window; give `sliding_window` a number of tokens"


def register_rotary(name: str, config_type: type[RotaryConfig], **common: Any) -> Callable[..., None]:
    """`register_family` for a `RotaryDecoder`."""
    return register_family(name, config_type, "ftk.models.rotary.model:RotaryDecoder", **common)
