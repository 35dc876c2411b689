"""What the options of Megatron-LM say about a model (megatron/training/arguments.py), and ftk's that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftk.errors import UserError

_LEARNED, _ROTARY = "learned_absolute", "rope"
_SHARED: dict[str, Any] = {"rotary_percent": 1.0, "rotary_interleaved": False, "softmax_type": "vanilla"}
_ABSENT = _SHARED | {  # what an option is that older files do not have
    "normalization": "LayerNorm",
    "swiglu": False,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "group_query_attention": False,
    "qk_layernorm": False,
}
_FAMILIES = {  # their position_embedding_type -> what the models have that are read
    _LEARNED: _ABSENT,
    _ROTARY: _SHARED | {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False},
}
_OFF = (  # change what a model computes, and are in none of ftk's
    *("num_experts", "num_moe_experts", "multi_latent_attention", "experimental_attention_variant", "mtp_num_layers"),
    *("retro_add_retriever", "squared_relu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value"),
    *("apply_layernorm_1p", "layernorm_zero_centered_gamma", "apply_residual_connection_post_layernorm", "use_mup"),
    *("qk_l2_norm", "softmax_scale", "window_size", "attention_output_gate", "head_wise_attn_gate"),
    *("no_rope_freq", "rotary_base_per_layer"),
    *("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
)
_NEEDED = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_RENAMED = {  # their option -> ours
    "max_position_embeddings": "max_positions",
    "init_method_std": "init_std",
    "hidden_dropout": "dropout",
    "layernorm_epsilon": "layer_norm_eps",
    "norm_epsilon": "layer_norm_eps",
}
_USED = dict.fromkeys((*_NEEDED, "ffn_hidden_size", "attention_dropout", *_RENAMED))


def check_sizes(theirs: Mapping[str, Any], *, num_ranks: int, num_stages: int) -> None:
    """Refuse a folder whose last ranks are missing: the others would still form a whole model."""
    for kind, found in (("tensor_model", num_ranks), ("model", num_ranks), ("pipeline_model", num_stages)):
        name = f"{kind}_parallel_size"  # "model" is of older files
        if (told := theirs.get(name)) is not None and told != found:
            raise UserError(f"its option {name} is {told!r:.40}, but there are files of {found}")


def model_options(theirs: Mapping[str, Any], vocab_size: int) -> tuple[str, dict[str, Any]]:
    """The name of ftk's model, and its options.

    Raises:
        UserError: an option that would change the model's answers and that ftk's cannot follow.
    """
    for name in _OFF:
        if theirs.get(name):
            raise UserError(f"its option {name} is {theirs[name]!r:.40}, which ftk's models do not have")
    if missing := [name for name in _NEEDED if theirs.get(name) is None]:
        raise UserError(f"its options have no {missing[0]}")
    older = _ROTARY if theirs.get("use_rotary_position_embeddings") else _LEARNED
    positions = theirs.get("position_embedding_type") or older
    if not isinstance(positions, str) or positions not in _FAMILIES:
        raise UserError(f"its option position_embedding_type is {positions!r:.40}; ftk reads {', '.join(_FAMILIES)}")
    for name, wanted in _FAMILIES[positions].items():
        found = _ABSENT[name] if theirs.get(name) is None else theirs[name]
        if found != wanted:
            raise UserError(
                f"its option {name} is {found!r:.40}; of models with position_embedding_type {positions} ftk reads"
                f" those with {wanted!r}"
            )
    options = {_RENAMED.get(name, name): theirs[name] for name in _USED if theirs.get(name) is not None}
    options["vocab_size"] = vocab_size
    if "dropout" in options:
        options["embedding_dropout"] = options["dropout"]
    size, heads, width = (theirs.get(name) for name in ("kv_channels", "num_attention_heads", "hidden_size"))
    own_size = isinstance(size, int) and isinstance(heads, int) and size * heads != width
    if positions == _LEARNED:
        if own_size:
            raise UserError(f"its option kv_channels is {size}; ftk's gpt2 has hidden_size / num_attention_heads")
        # The fused kernel computes the tanh form, which is the default.
        is_tanh = theirs.get("openai_gelu") or theirs.get("bias_gelu_fusion") in (None, True)
        return "gpt2", options | {"activation": "gelu_tanh" if is_tanh else "gelu"}
    with_bias, with_norms = bool(theirs.get("add_qkv_bias")), bool(theirs.get("qk_layernorm"))
    if with_bias and with_norms:
        raise UserError("its options add_qkv_bias and qk_layernorm are both on; none of ftk's models has both")
    options |= {
        "tie_embeddings": not theirs.get("untie_embeddings_and_output_weights"),
        "num_kv_heads": theirs.get("num_query_groups") if theirs.get("group_query_attention") else None,
        "head_dim": size if own_size else None,
    }
    return "qwen2" if with_bias else "qwen3" if with_norms else "llama", options | _rope(theirs)


def _rope(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Options of rotary positions (megatron/core/models/common/embeddings/rotary_pos_embedding.py)."""
    stretch = theirs.get("rotary_seq_len_interpolation_factor") or 1
    options: dict[str, Any] = {"rope_theta": theirs.get("rotary_base") or 10000.0}
    if theirs.get("use_rope_scaling"):
        if stretch != 1:
            raise UserError("its options use_rope_scaling and rotary_seq_len_interpolation_factor are both given")
        options |= {"rope_scaling": "llama3", "rope_factor": theirs.get("rope_scaling_factor") or 8.0}
        return options | {"rope_low": 1.0, "rope_high": 4.0, "rope_original_positions": 8192}  # constants there
    return options if stretch == 1 else options | {"rope_scaling": "linear", "rope_factor": stretch}


def padding(theirs: Mapping[str, Any], vocab_size: int, num_ranks: int) -> int:
    """What the number of rows was made a multiple of; 1 where it is no multiple of what the options say."""
    told = theirs.get("make_vocab_size_divisible_by")
    multiple = (told if isinstance(told, int) and told > 0 else 128) * num_ranks
    return multiple if vocab_size % multiple == 0 else 1
