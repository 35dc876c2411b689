"""Mistral in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.mistral import MistralConfig
from ftk.models.rotary.convert import USED, RotaryConverter
from ftk.registry import register_hf_model


@register_hf_model("mistral")
class MistralConverter(RotaryConverter):
    model_type = "mistral"
    architecture = "MistralForCausalLM"
    config_class = MistralConfig
    used: ClassVar[dict[str, tuple[str, Any]]] = USED | {
        "intermediate_size": ("ffn_hidden_size", 14336),
        "num_key_value_heads": ("num_kv_heads", 8),
        "max_position_embeddings": ("max_positions", 131072),
        "sliding_window": ("sliding_window", 4096),
    }
