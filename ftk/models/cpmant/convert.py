"""CPM-Ant in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import FamilyConverter, Rename, SeparateHeads
from ftk.models.cpmant import CPMAntConfig
from ftk.registry import register_hf_model

_LAYER = "cpmant.encoder.layers.*."
_PROJECTIONS = tuple(f"{_LAYER}self_att.self_attention.project_{part}.weight" for part in "qkv")


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
        Rename(("token_embedding.weight",), (embedding,)),
        Rename(("position_embedding.segment.weight",), ("cpmant.segment_embedding.weight",)),
        Rename(("position_bias.weight",), ("cpmant.position_bias.relative_attention_bias",)),
        Rename(
            ("layers.*.attention.qkv.weight",),
            _PROJECTIONS,
            SeparateHeads(),
        ),
        *(
            Rename((f"layers.*.{ours}.weight",), (f"{_LAYER}{theirs}.weight",))
            for ours, theirs in {
                "attention_norm": "self_att.layernorm_before_attention",
                "attention.output": "self_att.self_attention.attention_out",
                "feed_forward_norm": "ffn.layernorm_before_ffn",
                "feed_forward.gate": "ffn.ffn.w_in.w_0",
                "feed_forward.inner": "ffn.ffn.w_in.w_1",
                "feed_forward.output": "ffn.ffn.w_out",
            }.items()
        ),
        Rename(("final_norm.weight",), ("cpmant.encoder.output_layernorm.weight",)),
        Rename(("head.weight",), ("lm_head.weight",)),
    )

    def config_to(self, config: CPMAntConfig) -> dict[str, Any]:
        return {**super().config_to(config), "dim_ff": config.inner_size}
