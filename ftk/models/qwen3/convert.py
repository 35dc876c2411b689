"""Qwen3 in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.qwen3 import Qwen3Config
from ftk.models.rotary.convert import QwenConverter
from ftk.registry import register_hf_model


@register_hf_model("qwen3")
class Qwen3Converter(QwenConverter):
    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    config_class = Qwen3Config
    used: ClassVar[dict[str, tuple[str, Any]]] = QwenConverter.used | {
        "head_dim": ("head_dim", 128),
        "attention_bias": ("attention_bias", False),
    }
