"""GPT-2 in Hugging Face's form; its matrices are kept as [in, out] there, and the joint one as columns [q | k | v]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftk.models.conversion import JointHeads, Rename, Transposed, fields_from, weight_and_bias
from ftk.models.gpt2 import GPT2Config
from ftk.registry import register_hf_model

_LAYER = "transformer.h.*."
_USED: dict[str, tuple[str, Any]] = {  # their key -> ours, and what its absence means
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
}
_FIXED: dict[str, Any] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
_SUMMARIES = (
    "summary_type",
    "summary_use_proj",
    "summary_activation",
    "summary_proj_to_labels",
    "summary_first_dropout",
)


@register_hf_model("gpt2")
class GPT2Converter:
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
    )
    buffers = (f"{_LAYER}attn.bias", f"{_LAYER}attn.masked_bias")  # causal masks of older files

    def tied(self, config: GPT2Config) -> Mapping[str, str]:
        return {"lm_head.weight": "transformer.wte.weight"}

    def matches(self, config: dict[str, Any]) -> bool:
        return config.get("model_type") == "gpt2"

    def config_from(self, config: dict[str, Any]) -> GPT2Config:
        return GPT2Config(**fields_from(config, _USED, _FIXED, ignored=("n_ctx", *_SUMMARIES)))

    def config_to(self, config: GPT2Config) -> dict[str, Any]:
        ours = {theirs: getattr(config, name) for theirs, (name, _) in _USED.items()}
        fixed = {key: value[0] if isinstance(value, tuple) else value for key, value in _FIXED.items()}
        return {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", **ours, **fixed}

    def task(self, config: GPT2Config) -> dict[str, Any]:
        return {"_name": "causal_lm", "seq_length": config.max_positions, "make_vocab_size_divisible_by": 1}
