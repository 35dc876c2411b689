"""Qwen2 and 2.5 (Yang et al. 2024) and their published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.models.rotary.config import MixedWindowRotaryConfig, register_rotary


@dataclass(kw_only=True)
class Qwen2Config(MixedWindowRotaryConfig):
    """The shape of a Qwen2."""

    qkv_bias: ClassVar[bool] = True


register_size = register_rotary(
    "qwen2", Qwen2Config, vocab_size=151936, max_positions=32768, layer_norm_eps=1e-6, rope_theta=1e6
)
_LARGE: dict[str, Any] = {"vocab_size": 152064}

# not published: for tests and first tries
register_size("qwen2_tiny", 4, 64, 4, 172, num_kv_heads=2, max_positions=512)
register_size("qwen2_0_5b", 24, 896, 14, 4864, num_kv_heads=2, tie_embeddings=True)  # 494M parameters
register_size("qwen2_1_5b", 28, 1536, 12, 8960, num_kv_heads=2, tie_embeddings=True)  # 1.54B
register_size("qwen2_5_3b", 36, 2048, 16, 11008, num_kv_heads=2, tie_embeddings=True)  # 3.09B
register_size("qwen2_7b", 28, 3584, 28, 18944, num_kv_heads=4, **_LARGE)  # 7.62B
register_size("qwen2_5_14b", 48, 5120, 40, 13824, num_kv_heads=8, **_LARGE)  # 14.8B
register_size("qwen2_5_32b", 64, 5120, 40, 27648, num_kv_heads=8, **_LARGE)  # 32.8B
register_size("qwen2_72b", 80, 8192, 64, 29568, num_kv_heads=8, **_LARGE)  # 72.7B
