"""Qwen3 (Yang et al. 2025) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ftk.models.rotary.config import BiasedRotaryConfig, MixedWindowRotaryConfig, register_rotary


@dataclass(kw_only=True)
class Qwen3Config(MixedWindowRotaryConfig, BiasedRotaryConfig):
    """The shape of a Qwen3."""

    norms_heads: ClassVar[bool] = True


register_size = register_rotary(
    "qwen3",
    Qwen3Config,
    vocab_size=151936,
    max_positions=40960,
    layer_norm_eps=1e-6,
    rope_theta=1e6,
    num_kv_heads=8,
    head_dim=128,
)

# not published: for tests and first tries
register_size("qwen3_tiny", 4, 64, 4, 172, num_kv_heads=2, head_dim=24, max_positions=512, tie_embeddings=True)
register_size("qwen3_0_6b", 28, 1024, 16, 3072, tie_embeddings=True)  # 596M parameters
register_size("qwen3_1_7b", 28, 2048, 16, 6144, tie_embeddings=True)  # 1.72B
register_size("qwen3_4b", 36, 2560, 32, 9728, tie_embeddings=True)  # 4.02B
register_size("qwen3_8b", 36, 4096, 32, 12288)  # 8.19B
register_size("qwen3_14b", 40, 5120, 40, 17408)  # 14.8B
register_size("qwen3_32b", 64, 5120, 64, 25600)  # 32.8B
