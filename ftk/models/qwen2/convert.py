"""Qwen2 in Hugging Face's form."""

from __future__ import annotations

from ftk.models.qwen2 import Qwen2Config
from ftk.models.rotary.convert import QwenConverter
from ftk.registry import register_hf_model


@register_hf_model("qwen2")
class Qwen2Converter(QwenConverter):
    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    config_class = Qwen2Config
