"""CPM-Ant in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import FamilyConverter
from ftk.models.cpm.convert import stack_renames
from ftk.models.cpmant import CPMAntConfig
from ftk.models.renames import Rename, weights
from ftk.registry import register_hf_model


@register_hf_model("cpmant")
class CPMAntConverter(FamilyConverter):
    model_type = "cpmant"
    architecture = "CpmAntForCausalLM"
    config_class = CPMAntConfig
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 30720),
        "hidden_size": ("hidden_size", 4096),
        "num_attention_heads": ("num_attention_heads", 32),
        "dim_head": ("head_dim", 128),
        "dim_ff": ("ffn_hidden_size", 10240),
        "num_hidden_layers": ("num_layers", 48),
        "position_bias_num_buckets": ("num_position_buckets", 512),
        "position_bias_max_distance": ("max_position_distance", 2048),
        "eps": ("layer_norm_eps", 1e-6),
        "prompt_types": ("prompt_types", 32),
        "prompt_length": ("prompt_length", 32),
        "segment_types": ("segment_types", 32),
    }
    fixed: ClassVar[dict[str, Any]] = {"dropout_p": (0.0, None)}
    ignored = ("init_std", "tie_word_embeddings", "mask_modules", "half")
    embedding = "cpmant.input_embedding.weight"
    prefix = "cpmant."
    renames = (
        weights(["token_embedding"], ["cpmant.input_embedding"]),
        weights(["position_embedding.segment"], ["cpmant.segment_embedding"]),
        Rename(("position_bias.weight",), ("cpmant.position_bias.relative_attention_bias",)),
        *stack_renames("", "cpmant.encoder"),
        weights(["head"], ["lm_head"]),
    )

    def config_to(self, config: CPMAntConfig) -> dict[str, Any]:
        return {**super().config_to(config), "dim_ff": config.inner_size}
