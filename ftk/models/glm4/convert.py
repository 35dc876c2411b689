"""GLM-4 and GLM-4-0414 in Hugging Face's form, there "glm" and "glm4"; ChatGLM2 in the form of its own code."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.models.conversion import FamilyConverter, fields_from
from ftk.models.glm4 import ChatGLM2Config, GLM4Config, GLM4x0414Config
from ftk.models.renames import HALVES, JointGroups, Rename, weight_and_bias
from ftk.models.rotary.convert import FIXED, PARTIAL, USED, RotaryConverter
from ftk.registry import register_hf_model

_LAYER = "model.layers.*."


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
        return super().matches(config) and "num_hidden_layers" in config


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


_THETA = 10000.0  # of a model whose `rope_ratio` is 1
_GLM4_VOCABULARY = 151552
_CHAT_LAYER = "transformer.encoder.layers.*."


@register_hf_model("chatglm2")
class ChatGLM2Converter(FamilyConverter):
    """Of ChatGLM2, ChatGLM3 and the first files of GLM-4, whose code comes with them."""

    model_type = "chatglm"
    architecture = "ChatGLMForConditionalGeneration"
    config_class = ChatGLM2Config
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "padded_vocab_size": ("vocab_size", 65024),
        "num_layers": ("num_layers", 28),
        "hidden_size": ("hidden_size", 4096),
        "num_attention_heads": ("num_attention_heads", 32),
        "multi_query_group_num": ("num_kv_heads", 1),
        "kv_channels": ("head_dim", 128),
        "ffn_hidden_size": ("ffn_hidden_size", 13696),
        "seq_length": ("max_positions", 2048),
        "layernorm_epsilon": ("layer_norm_eps", 1e-5),
        "add_qkv_bias": ("attention_bias", False),
        "attention_dropout": ("attention_dropout", 0.0),
        "hidden_dropout": ("dropout", 0.0),
    }
    fixed: ClassVar[dict[str, Any]] = {
        "add_bias_linear": False,
        "apply_residual_connection_post_layernorm": False,
        "interleaved_qkv": False,
        "multi_query_attention": True,
        "original_rope": True,
        "post_layer_norm": True,
        "rmsnorm": True,
        "tie_word_embeddings": False,
        "pre_seq_len": None,
        "quantization_bit": (0, None),
    }
    ignored = (
        *("apply_query_key_layer_scaling", "attention_softmax_in_fp32", "bias_dropout_fusion", "classifier_dropout"),
        *("fp32_residual_connection", "num_hidden_layers", "prefix_projection", "vocab_size"),
    )
    embedding = "transformer.embedding.word_embeddings.weight"
    prefix = "transformer."
    renames = (
        Rename(("token_embedding.weight",), (embedding,)),
        Rename(("layers.*.attention_norm.weight",), (f"{_CHAT_LAYER}input_layernorm.weight",)),
        *weight_and_bias(
            "layers.*.attention.qkv", f"{_CHAT_LAYER}self_attention.query_key_value", JointGroups(), JointGroups()
        ),
        Rename(("layers.*.attention.output.weight",), (f"{_CHAT_LAYER}self_attention.dense.weight",)),
        Rename(("layers.*.feed_forward_norm.weight",), (f"{_CHAT_LAYER}post_attention_layernorm.weight",)),
        Rename(
            ("layers.*.feed_forward.gate.weight", "layers.*.feed_forward.inner.weight"),
            (f"{_CHAT_LAYER}mlp.dense_h_to_4h.weight",),
            HALVES,
        ),
        Rename(("layers.*.feed_forward.output.weight",), (f"{_CHAT_LAYER}mlp.dense_4h_to_h.weight",)),
        Rename(("final_norm.weight",), ("transformer.encoder.final_layernorm.weight",)),
        Rename(("head.weight",), ("transformer.output_layer.weight",)),
    )
    buffers = ("transformer.rotary_pos_emb.inv_freq",)

    def matches(self, config: dict[str, Any]) -> bool:
        """The first ChatGLM has the same `model_type`, and no such key."""
        return super().matches(config) and "padded_vocab_size" in config

    def config_from(self, config: dict[str, Any]) -> ChatGLM2Config:
        # Where the key is absent, the value is False; then the rows of the joint projection are in another order.
        theirs = {"multi_query_attention": False} | config
        for key in ("rope_ratio", "rope_theta"):
            theirs.pop(key, None)
        options = fields_from(theirs, self.used, self.fixed, self.ignored)
        return ChatGLM2Config(**options, rope_theta=_theta(config))

    def config_to(self, config: ChatGLM2Config) -> dict[str, Any]:
        widths = {"kv_channels": config.head_size, "ffn_hidden_size": config.inner_size}
        groups = {"multi_query_group_num": config.kv_heads}
        rotation = {"rope_ratio": config.rope_theta / _THETA}
        if config.rope_theta != _THETA:
            rotation["rope_theta"] = config.rope_theta
        return {**super().config_to(config), **widths, **groups, **rotation}


def _theta(config: dict[str, Any]) -> float:
    """Base of the rotation, which GLM-4 and ChatGLM3-32k scale by `rope_ratio`.

    Raises:
        UserError: ChatGLM2-32k may be meant, whose code divides positions by the ratio; its config.json has the same
            keys as ChatGLM3-32k's. `rope_theta`, which neither has, says that theta is scaled.
    """
    ratio = config.get("rope_ratio", 1)
    if not isinstance(ratio, int | float):
        raise UserError(f"config.json: rope_ratio is {ratio!r:.40}; it must be a number")
    theta = _THETA * ratio
    is_known = ratio == 1 or config["padded_vocab_size"] == _GLM4_VOCABULARY
    if config.get("rope_theta", theta if is_known else None) != theta:
        raise UserError(
            f"config.json: rope_ratio is {ratio}, by which ChatGLM3-32k multiplies theta, but ChatGLM2-32k divides "
            f'positions, which ftk does not; for the former, add "rope_theta": {theta:.10g}'
        )
    return theta
