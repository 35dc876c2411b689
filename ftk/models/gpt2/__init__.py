"""GPT-2 (Radford et al. 2019) and its published sizes, registered here without importing torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.models.config import TransformerConfig
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


def _register(
    name: str, num_layers: int, hidden_size: int, num_heads: int, lr: float, max_positions: int = 1024, **more: Any
) -> None:
    recipe = {
        "optimizer": {"_name": "adamw", "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "lr_scheduler": {"_name": "cosine", "warmup_ratio": 0.02, "min_lr_ratio": 0.1},
        **more,
    }

    @register_architecture(name, model="gpt2", recipe=recipe)
    def preset() -> GPT2Config:
        return GPT2Config(
            num_layers=num_layers,
            hidden_size=hidden_size,
            num_attention_heads=num_heads,
            max_positions=max_positions,
            vocab_size=50257,
        )


# GPT-2's rates are not published: these are GPT-3's for models of these sizes (Brown et al. 2020, table 2.1).
# not published: for tests and first tries
_register("gpt2_tiny", 4, 64, 4, 3e-3, 512, task={"_name": "causal_lm", "seq_length": 256})
_register("gpt2", 12, 768, 12, 6e-4)  # 124M parameters
_register("gpt2_medium", 24, 1024, 16, 3e-4)  # 355M
_register("gpt2_large", 36, 1280, 20, 2.5e-4)  # 774M
_register("gpt2_xl", 48, 1600, 25, 2e-4)  # 1.56B
