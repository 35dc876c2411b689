"""Mistral (Jiang et al. 2023) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass

from ftk.models.rotary.config import WindowedRotaryConfig, register_rotary


@dataclass(kw_only=True)
class MistralConfig(WindowedRotaryConfig):
    """The shape of a Mistral."""


register_size = register_rotary(
    "mistral", MistralConfig, vocab_size=32000, num_kv_heads=8, layer_norm_eps=1e-5, max_positions=32768
)

# not published: for tests and first tries
register_size("mistral_tiny", 4, 64, 4, 172, num_kv_heads=2, max_positions=512)
register_size("mistral_7b_v0_1", 32, 4096, 32, 14336, sliding_window=4096)  # 7.24B parameters
register_size("mistral_7b", 32, 4096, 32, 14336, rope_theta=1e6)  # v0.2
register_size("mistral_7b_v0_3", 32, 4096, 32, 14336, rope_theta=1e6, vocab_size=32768)
