"""GPT-2 (Radford et al. 2019) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftk.models.config import TransformerConfig, causal_recipe
from ftk.registry import register_architecture, register_model

if TYPE_CHECKING:
    from ftk.models.gpt2.model import GPT2


@dataclass(kw_only=True)
class GPT2Config(TransformerConfig):
    """The shape of a GPT-2 and its dropout."""


@register_model("gpt2", config=GPT2Config, task="causal_lm")
def build_gpt2(config: GPT2Config, seed: int | None = None) -> GPT2:
    """`GPT2(config, seed)`: see there."""
    from ftk.models.gpt2.model import GPT2

    return GPT2(config, seed)


def _register(name: str, num_layers: int, hidden_size: int, num_heads: int, max_positions: int = 1024) -> None:
    @register_architecture(name, model="gpt2", recipe=causal_recipe(hidden_size))
    def preset() -> GPT2Config:
        return GPT2Config(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            max_positions=max_positions,
            vocab_size=50257,
        )


_register("gpt2_tiny", 4, 64, 4, 512)  # not published: for tests and first tries
_register("gpt2", 12, 768, 12)  # 124M parameters
_register("gpt2_medium", 24, 1024, 16)  # 355M
_register("gpt2_large", 36, 1280, 20)  # 774M
_register("gpt2_xl", 48, 1600, 25)  # 1.56B
