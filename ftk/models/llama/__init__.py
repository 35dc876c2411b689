"""LLaMA 1 to 3 (Touvron et al. 2023, Dubey et al. 2024) and their sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ftk.config.options import option
from ftk.models.rotary.config import BiasedRotaryConfig, register_rotary


@dataclass(kw_only=True)
class LlamaConfig(BiasedRotaryConfig):
    """The shape of a LLaMA."""

    mlp_bias: bool = option(False, "biases in the three matrices of feed-forward networks")  # type: ignore[misc]


register_size = register_rotary("llama", LlamaConfig, vocab_size=32000, max_positions=2048, layer_norm_eps=1e-6)
_TWO: dict[str, Any] = {"max_positions": 4096, "layer_norm_eps": 1e-5}
_THREE: dict[str, Any] = {
    "vocab_size": 128256,
    "max_positions": 8192,
    "layer_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "num_kv_heads": 8,
}
_SCALED: dict[str, Any] = {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_positions": 8192}
_LONG: dict[str, Any] = {**_THREE, **_SCALED, "max_positions": 131072}
_SMALL: dict[str, Any] = {**_LONG, "rope_factor": 32.0, "tie_embeddings": True}

# not published: for tests and first tries
register_size("llama_tiny", 4, 64, 4, 172, num_kv_heads=2, max_positions=512)
register_size("llama_7b", 32, 4096, 32, 11008)  # 6.74B parameters
register_size("llama_13b", 40, 5120, 40, 13824)  # 13.0B
register_size("llama_33b", 60, 6656, 52, 17920)  # 32.5B
register_size("llama_65b", 80, 8192, 64, 22016)  # 65.3B
register_size("llama2_7b", 32, 4096, 32, 11008, **_TWO)
register_size("llama2_13b", 40, 5120, 40, 13824, **_TWO)
register_size("llama2_70b", 80, 8192, 64, 28672, num_kv_heads=8, **_TWO)  # 69.0B
register_size("llama3_8b", 32, 4096, 32, 14336, **_THREE)  # 8.03B
register_size("llama3_70b", 80, 8192, 64, 28672, **_THREE)  # 70.6B
register_size("llama3_1_8b", 32, 4096, 32, 14336, **_LONG)
register_size("llama3_1_70b", 80, 8192, 64, 28672, **_LONG)
register_size("llama3_1_405b", 126, 16384, 128, 53248, **_LONG)  # 405.9B
register_size("llama3_2_1b", 16, 2048, 32, 8192, **_SMALL)  # 1.24B
register_size("llama3_2_3b", 28, 3072, 24, 8192, **_SMALL)  # 3.21B
