"""Qwen3 (Yang et al. 2025) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.models.config import causal_recipe
from ftk.models.rotary.config import BiasedRotaryConfig
from ftk.registry import register_architecture, register_model

if TYPE_CHECKING:
    from ftk.models.rotary.model import RotaryDecoder


@dataclass(kw_only=True)
class Qwen3Config(BiasedRotaryConfig):
    """The shape of a Qwen3."""

    norms_heads: ClassVar[bool] = True


@register_model("qwen3", config=Qwen3Config, task="causal_lm")
def build_qwen3(config: Qwen3Config, seed: int | None = None) -> RotaryDecoder:
    """`RotaryDecoder(config, seed)`: see there."""
    from ftk.models.rotary.model import RotaryDecoder

    return RotaryDecoder(config, seed)


def _register(name: str, num_layers: int, hidden_size: int, num_heads: int, inner_size: int, **options: Any) -> None:
    @register_architecture(name, model="qwen3", recipe=causal_recipe(hidden_size))
    def preset() -> Qwen3Config:
        shape = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads}
        return Qwen3Config(**shape, ffn_hidden_size=inner_size, **_ALL | options)


_ALL: dict[str, Any] = {
    "vocab_size": 151936,
    "max_positions": 40960,
    "layer_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "num_kv_heads": 8,
    "head_dim": 128,
}

_TINY: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 24, "max_positions": 512, "tie_embeddings": True}

_register("qwen3_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
_register("qwen3_0_6b", 28, 1024, 16, 3072, tie_embeddings=True)  # 596M parameters
_register("qwen3_1_7b", 28, 2048, 16, 6144, tie_embeddings=True)  # 1.72B
_register("qwen3_4b", 36, 2560, 32, 9728, tie_embeddings=True)  # 4.02B
_register("qwen3_8b", 36, 4096, 32, 12288)  # 8.19B
_register("qwen3_14b", 40, 5120, 40, 17408)  # 14.8B
_register("qwen3_32b", 64, 5120, 64, 25600)  # 32.8B
