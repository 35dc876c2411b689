"""Mistral (Jiang et al. 2023) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.models.config import causal_recipe
from ftk.models.rotary.config import RotaryConfig
from ftk.registry import register_architecture, register_model

if TYPE_CHECKING:
    from ftk.models.rotary.model import RotaryDecoder


@dataclass(kw_only=True)
class MistralConfig(RotaryConfig):
    """The shape of a Mistral."""


@register_model("mistral", config=MistralConfig, task="causal_lm")
def build_mistral(config: MistralConfig, seed: int | None = None) -> RotaryDecoder:
    """`RotaryDecoder(config, seed)`: see there."""
    from ftk.models.rotary.model import RotaryDecoder

    return RotaryDecoder(config, seed)


def _register(name: str, num_layers: int, hidden_size: int, num_heads: int, inner_size: int, **options: Any) -> None:
    @register_architecture(name, model="mistral", recipe=causal_recipe(hidden_size))
    def preset() -> MistralConfig:
        shape = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads}
        return MistralConfig(**shape, ffn_hidden_size=inner_size, **_ALL | options)


_ALL: dict[str, Any] = {"vocab_size": 32000, "num_kv_heads": 8, "layer_norm_eps": 1e-5, "max_positions": 32768}

_register("mistral_7b", 32, 4096, 32, 14336, rope_theta=1e6)  # v0.2: 7.24B parameters
_register("mistral_7b_v0_3", 32, 4096, 32, 14336, rope_theta=1e6, vocab_size=32768)
