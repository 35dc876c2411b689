"""RoBERTa, XLM-RoBERTa and CamemBERT in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.encoder.convert import PaddedEncoderConverter, renames
from ftk.models.roberta import CamembertConfig, RobertaConfig, XlmRobertaConfig
from ftk.registry import register_hf_model


@register_hf_model("roberta")
class RobertaConverter(PaddedEncoderConverter):
    model_type = "roberta"
    architecture = "RobertaForMaskedLM"
    config_class = RobertaConfig
    own: ClassVar[dict[str, tuple[str, Any]]] = {"vocab_size": ("vocab_size", 50265), "pad_token_id": ("pad_token", 1)}
    prefix = "roberta."
    renames = renames(prefix, PaddedEncoderConverter.head_names)


@register_hf_model("xlm_roberta")
class XlmRobertaConverter(RobertaConverter):
    model_type = "xlm-roberta"
    architecture = "XLMRobertaForMaskedLM"
    config_class = XlmRobertaConfig
    own: ClassVar[dict[str, tuple[str, Any]]] = {**RobertaConverter.own, "vocab_size": ("vocab_size", 30522)}


@register_hf_model("camembert")
class CamembertConverter(RobertaConverter):
    model_type = "camembert"
    architecture = "CamembertForMaskedLM"
    config_class = CamembertConfig
    own = XlmRobertaConverter.own
