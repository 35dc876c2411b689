"""OPT in Hugging Face's form."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import FamilyConverter
from ftk.models.opt import OPTConfig
from ftk.models.renames import Rename, SeparateHeads, weight_and_bias, weights_and_biases
from ftk.registry import register_hf_model

_LAYER = "model.decoder.layers.*."


@register_hf_model("opt")
class OPTConverter(FamilyConverter):
    model_type = "opt"
    architecture = "OPTForCausalLM"
    config_class = OPTConfig
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 50272),
        "hidden_size": ("hidden_size", 768),
        "num_hidden_layers": ("num_layers", 12),
        "num_attention_heads": ("num_attention_heads", 12),
        "ffn_dim": ("ffn_hidden_size", 3072),
        "max_position_embeddings": ("max_positions", 2048),
        "word_embed_proj_dim": ("word_embedding_size", None),
        "do_layer_norm_before": ("norm_first", True),
        "activation_function": ("activation", "relu"),
        "tie_word_embeddings": ("tie_embeddings", True),
        "enable_bias": ("bias", True),
        "layer_norm_elementwise_affine": ("norm_weights", True),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "layerdrop": ("layer_drop", 0.0),
        "init_std": ("init_std", 0.02),
    }
    fixed: ClassVar[dict[str, Any]] = {
        "_remove_final_layer_norm": False,
        "learned_embeddings": (True, None),
        "scale_embeddings": (False, None),
    }
    ignored = ("activation_dropout",)  # 0 in published files
    embedding = "model.decoder.embed_tokens.weight"
    prefix = "model."
    renames = (
        Rename(("token_embedding.weight",), ("model.decoder.embed_tokens.weight",)),
        Rename(("position_embedding.weight",), ("model.decoder.embed_positions.weight",)),
        Rename(("project_in.weight",), ("model.decoder.project_in.weight",)),
        *weight_and_bias("layers.*.attention_norm", f"{_LAYER}self_attn_layer_norm"),
        *weights_and_biases(
            ["layers.*.attention.qkv"], [f"{_LAYER}self_attn.{part}_proj" for part in "qkv"], SeparateHeads()
        ),
        *weight_and_bias("layers.*.attention.output", f"{_LAYER}self_attn.out_proj"),
        *weight_and_bias("layers.*.feed_forward_norm", f"{_LAYER}final_layer_norm"),
        *weight_and_bias("layers.*.feed_forward.inner", f"{_LAYER}fc1"),
        *weight_and_bias("layers.*.feed_forward.output", f"{_LAYER}fc2"),
        *weight_and_bias("final_norm", "model.decoder.final_layer_norm"),
        Rename(("project_out.weight",), ("model.decoder.project_out.weight",)),
        Rename(("head.weight",), ("lm_head.weight",)),
    )

    def config_to(self, config: OPTConfig) -> dict[str, Any]:
        widths = {"ffn_dim": config.inner_size, "word_embed_proj_dim": config.embedding_size}
        return {**super().config_to(config), **widths}
