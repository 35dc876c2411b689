"""GLM-4 and GLM-4-0414 in Hugging Face's form, which calls them "glm" and "glm4"."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import HALVES, Rename
from ftk.models.glm4 import GLM4Config, GLM4x0414Config
from ftk.models.rotary.convert import FIXED, PARTIAL, USED, RotaryConverter
from ftk.registry import register_hf_model

_LAYER = "model.layers.*."
_APART = tuple(f"{_LAYER}mlp.{part}_proj.weight" for part in ("gate", "up"))


@register_hf_model("glm4")
class GLM4Converter(RotaryConverter):
    model_type = "glm"
    architecture = "GlmForCausalLM"
    config_class = GLM4Config
    used: ClassVar[dict[str, tuple[str, Any]]] = USED | {
        "vocab_size": ("vocab_size", 151552),
        "intermediate_size": ("ffn_hidden_size", 13696),
        "num_hidden_layers": ("num_layers", 40),
        "num_key_value_heads": ("num_kv_heads", 2),
        "head_dim": ("head_dim", 128),
        "max_position_embeddings": ("max_positions", 131072),
        "rms_norm_eps": ("layer_norm_eps", 1.5625e-7),
        "attention_bias": ("attention_bias", True),
        PARTIAL: ("rotary_share", 0.5),
    }
    fixed: ClassVar[dict[str, Any]] = {key: value for key, value in FIXED.items() if key != PARTIAL}
    renames = (
        *(
            rename
            for rename in RotaryConverter.renames
            if not rename.theirs[0].endswith(("gate_proj.weight", "up_proj.weight"))
        ),
        Rename(
            ("layers.*.feed_forward.gate.weight", "layers.*.feed_forward.inner.weight"),
            (f"{_LAYER}mlp.gate_up_proj.weight",),
            HALVES,
        ),
    )

    def matches(self, config: dict[str, Any]) -> bool:
        """The original GLM in this form has the same `model_type`, and no such key."""
        return super().matches(config) and "max_sequence_length" not in config


@register_hf_model("glm4_0414")
class GLM4x0414Converter(GLM4Converter):
    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    config_class = GLM4x0414Config
    renames = (
        *GLM4Converter.renames,
        Rename(("layers.*.attention_output_norm.weight",), (f"{_LAYER}post_self_attn_layernorm.weight",)),
        Rename(("layers.*.feed_forward_output_norm.weight",), (f"{_LAYER}post_mlp_layernorm.weight",)),
    )
