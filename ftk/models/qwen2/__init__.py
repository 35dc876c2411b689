"""Qwen2 and 2.5 (Yang et al. 2024) and their published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.models.config import causal_recipe
from ftk.models.rotary.config import RotaryConfig
from ftk.registry import register_architecture, register_model

if TYPE_CHECKING:
    from ftk.models.rotary.model import RotaryDecoder


@dataclass(kw_only=True)
class Qwen2Config(RotaryConfig):
    """The shape of a Qwen2."""

    qkv_bias: ClassVar[bool] = True


@register_model("qwen2", config=Qwen2Config, task="causal_lm")
def build_qwen2(config: Qwen2Config, seed: int | None = None) -> RotaryDecoder:
    """`RotaryDecoder(config, seed)`: see there."""
    from ftk.models.rotary.model import RotaryDecoder

    return RotaryDecoder(config, seed)


def _register(name: str, num_layers: int, hidden_size: int, num_heads: int, inner_size: int, **options: Any) -> None:
    @register_architecture(name, model="qwen2", recipe=causal_recipe(hidden_size))
    def preset() -> Qwen2Config:
        shape: dict[str, Any] = {"num_layers": num_layers, "hidden_size": hidden_size, "num_attention_heads": num_heads}
        return Qwen2Config(**shape, ffn_hidden_size=inner_size, **_ALL | options)


_ALL: dict[str, Any] = {"vocab_size": 151936, "max_positions": 32768, "layer_norm_eps": 1e-6, "rope_theta": 1e6}
_LARGE: dict[str, Any] = {"vocab_size": 152064}

_TINY: dict[str, Any] = {"num_kv_heads": 2, "max_positions": 512}

_register("qwen2_tiny", 4, 64, 4, 172, **_TINY)  # not published: for tests and first tries
_register("qwen2_0_5b", 24, 896, 14, 4864, num_kv_heads=2, tie_embeddings=True)  # 494M parameters
_register("qwen2_1_5b", 28, 1536, 12, 8960, num_kv_heads=2, tie_embeddings=True)  # 1.54B
_register("qwen2_5_3b", 36, 2048, 16, 11008, num_kv_heads=2, tie_embeddings=True)  # 3.09B
_register("qwen2_7b", 28, 3584, 28, 18944, num_kv_heads=4, **_LARGE)  # 7.62B
_register("qwen2_5_14b", 48, 5120, 40, 13824, num_kv_heads=8, **_LARGE)  # 14.8B
_register("qwen2_5_32b", 64, 5120, 40, 27648, num_kv_heads=8, **_LARGE)  # 32.8B
_register("qwen2_72b", 80, 8192, 64, 29568, num_kv_heads=8, **_LARGE)  # 72.7B
