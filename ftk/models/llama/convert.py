"""Llama in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.llama import LlamaConfig
from ftk.models.rotary.convert import FIXED, USED, RotaryConverter
from ftk.registry import register_hf_model


@register_hf_model("llama")
class LlamaConverter(RotaryConverter):
    model_type = "llama"
    architecture = "LlamaForCausalLM"
    config_class = LlamaConfig
    used: ClassVar[dict[str, tuple[str, Any]]] = USED | {
        "attention_bias": ("attention_bias", False),
        "mlp_bias": ("mlp_bias", False),
    }
    fixed: ClassVar[dict[str, Any]] = {key: value for key, value in FIXED.items() if key != "mlp_bias"}
