"""Mistral in Hugging Face's form."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.models.mistral import MistralConfig
from ftk.models.rotary.config import RotaryConfig
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
    }

    def config_from(self, config: dict[str, Any]) -> RotaryConfig:
        """Of version 0.1, whose tokens see those of a window, as many positions as are in it: there is no other."""
        theirs = {key: value for key, value in config.items() if key != "sliding_window"}
        found = super().config_from(theirs)
        window = config.get("sliding_window", 4096)
        if window is None:
            return found
        if not isinstance(window, int) or not isinstance(found.max_positions, int):
            raise UserError(
                f"config.json: sliding_window is {window!r:.40}; it must be a whole number of tokens, or null"
            )
        return dataclasses.replace(found, max_positions=min(found.max_positions, window))

    def config_to(self, config: RotaryConfig) -> dict[str, Any]:
        return {**super().config_to(config), "sliding_window": None}
