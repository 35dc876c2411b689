"""GPT-2 in Hugging Face's form; its matrices are kept as [in, out] there, and the joint one as columns [q | k | v]."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import FamilyConverter
from ftk.models.gpt2 import GPT2Config
from ftk.models.renames import JointHeads, Rename, Transposed, weight_and_bias
from ftk.registry import register_hf_model

_LAYER = "transformer.h.*."
SUMMARIES = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)


@register_hf_model("gpt2")
class GPT2Converter(FamilyConverter):
    model_type = "gpt2"
    architecture = "GPT2LMHeadModel"
    config_class = GPT2Config
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 50257),
        "n_layer": ("num_layers", 12),
        "n_embd": ("hidden_size", 768),
        "n_head": ("num_attention_heads", 12),
        "n_positions": ("max_positions", 1024),
        "n_inner": ("ffn_hidden_size", None),
        "embd_pdrop": ("embedding_dropout", 0.1),
        "attn_pdrop": ("attention_dropout", 0.1),
        "resid_pdrop": ("dropout", 0.1),
        "layer_norm_epsilon": ("layer_norm_eps", 1e-5),
        "initializer_range": ("init_std", 0.02),
        "activation_function": ("activation", "gelu_new"),
        "scale_attn_weights": ("scale_scores", True),
        "scale_attn_by_inverse_layer_idx": ("scale_by_layer", False),
        "tie_word_embeddings": ("tie_embeddings", True),
    }
    fixed: ClassVar[dict[str, Any]] = {"add_cross_attention": False}
    ignored = (
        *("n_ctx", "n_special", "predict_special_tokens", *SUMMARIES),
        "reorder_and_upcast_attn",  # says in which order scores are scaled
    )
    embedding = "transformer.wte.weight"
    prefix = "transformer."
    renames = (
        Rename(("token_embedding.weight",), ("transformer.wte.weight",)),
        Rename(("position_embedding.weight",), ("transformer.wpe.weight",)),
        *weight_and_bias("layers.*.attention_norm", f"{_LAYER}ln_1"),
        *weight_and_bias("layers.*.attention.qkv", f"{_LAYER}attn.c_attn", JointHeads(transposed=True), JointHeads()),
        *weight_and_bias("layers.*.attention.output", f"{_LAYER}attn.c_proj", Transposed()),
        *weight_and_bias("layers.*.feed_forward_norm", f"{_LAYER}ln_2"),
        *weight_and_bias("layers.*.feed_forward.inner", f"{_LAYER}mlp.c_fc", Transposed()),
        *weight_and_bias("layers.*.feed_forward.output", f"{_LAYER}mlp.c_proj", Transposed()),
        *weight_and_bias("final_norm", "transformer.ln_f"),
        Rename(("head.weight",), ("lm_head.weight",)),
    )
    buffers = (f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias")  # causal masks of older files
