"""Qwen3 in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.qwen3 import Qwen3Config
from ftk.models.rotary.convert import RotaryConverter
from ftk.registry import register_hf_model


@register_hf_model("qwen3")
class Qwen3Converter(RotaryConverter):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    config_class = Qwen3Config
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 151936,
        "ffn_hidden_size": 22016,
        "num_kv_heads": 32,
        "max_positions": 32768,
        "head_dim": 128,
    }
    used: ClassVar[dict[str, tuple[str, Any]]] = {"attention_bias": ("attention_bias", False)}
    fixed: ClassVar[dict[str, Any]] = {"use_sliding_window": False}
    ignored = ("sliding_window", "max_window_layers", "layer_types")  # used with use_sliding_window alone
