"""Longformer in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.models.encoder.config import EncoderConfig
from ftk.models.encoder.convert import PaddedEncoderConverter, renames
from ftk.models.longformer import LongformerConfig
from ftk.models.renames import SeparateHeads, weights_and_biases
from ftk.registry import register_hf_model

_WINDOW = "attention_window"
_SELF = "longformer.encoder.layer.*.attention.self."


@register_hf_model("longformer")
class LongformerConverter(PaddedEncoderConverter):
    model_type = "longformer"
    architecture = "LongformerForMaskedLM"
    config_class = LongformerConfig
    own: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 30522),
        "pad_token_id": ("pad_token", 1),
        _WINDOW: ("attention_window", 512),
    }
    fixed: ClassVar[dict[str, Any]] = PaddedEncoderConverter.fixed | {
        "attention_mode": ("longformer", None),
        "ignore_attention_mask": (False, None),
    }
    ignored = (*PaddedEncoderConverter.ignored, "onnx_export")
    prefix = "longformer."
    renames = (
        *renames(prefix, PaddedEncoderConverter.head_names),
        *weights_and_biases(
            ["layers.*.attention.qkv_global"],
            [f"{_SELF}{part}_global" for part in ("query", "key", "value")],
            SeparateHeads(),
        ),
    )

    def config_from(self, config: dict[str, Any]) -> EncoderConfig:
        window = config.get(_WINDOW, 512)
        windows = window if isinstance(window, list) else [window]
        if not windows or not all(isinstance(size, int) for size in windows):
            raise UserError(
                f"config.json: {_WINDOW} is {window!r:.60}; it must be a whole number, or one for each layer"
            )
        return super().config_from(config | {_WINDOW: windows})

    def config_to(self, config: Any) -> dict[str, Any]:
        window = config.attention_window
        return {**super().config_to(config), _WINDOW: window[0] if len(window) == 1 else window}
