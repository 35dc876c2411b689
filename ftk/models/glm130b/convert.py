"""The parameter names of GLM-130B, and ChatGLM-6B in the form of its own code.

Both lay the rows of their joint projection out as ftk does, [heads, 3, head_size].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from ftk.errors import UserError
from ftk.models.conversion import FamilyConverter
from ftk.models.glm import register_original_family
from ftk.models.glm.convert import OriginalFamily
from ftk.models.glm130b import GLM130B_POSITIONS, ChatGLMConfig, GLM130BConfig
from ftk.models.renames import HALVES, LazyTensors, Rename, weight_and_bias, weights_and_biases
from ftk.registry import register_hf_model

_LAYER = "transformer.layers.*."
_HEAD = "lm_head.weight"
_EMBEDDING = "transformer.word_embeddings.weight"
_SHARED = (
    Rename(("token_embedding.weight",), (_EMBEDDING,)),
    *weight_and_bias("layers.*.attention_norm", f"{_LAYER}input_layernorm"),
    *weight_and_bias("layers.*.attention.qkv", f"{_LAYER}attention.query_key_value"),
    *weight_and_bias("layers.*.attention.output", f"{_LAYER}attention.dense"),
    *weight_and_bias("layers.*.feed_forward_norm", f"{_LAYER}post_attention_layernorm"),
    *weight_and_bias("layers.*.feed_forward.output", f"{_LAYER}mlp.dense_4h_to_h"),
    *weight_and_bias("final_norm", "transformer.final_layernorm"),
)
GLM130B_RENAMES: tuple[Rename, ...] = (
    *_SHARED,
    *weights_and_biases(  # the second half is activated
        ["layers.*.feed_forward.inner", "layers.*.feed_forward.gate"], [f"{_LAYER}mlp.dense_h_to_4h"], HALVES
    ),
)


@register_original_family("glm130b")
class GLM130BFamily(OriginalFamily):
    """Of GLM-130B, which was published without an optimizer, in parts of SwissArmyTransformer."""

    title = "GLM-130B"
    config_class = GLM130BConfig
    embedding = _EMBEDDING
    renames = GLM130B_RENAMES
    inner_matrices = 2

    def config(self, shapes: Mapping[str, torch.Size], shape: dict[str, Any]) -> GLM130BConfig:
        return GLM130BConfig(**shape, max_positions=2048, **GLM130B_POSITIONS)

    def task(self, config: GLM130BConfig) -> dict[str, Any]:
        positions = {name: getattr(config, name) for name in GLM130B_POSITIONS}
        return {"_name": "glm_blank", "seq_length": config.max_positions, **positions}


@register_hf_model("chatglm")
class ChatGLMConverter(FamilyConverter):
    """Of ChatGLM-6B, whose code comes with its files.

    That code has one tensor as embedding and as output layer unless config.json says otherwise; the files have both.
    """

    model_type = "chatglm"
    architecture = "ChatGLMForConditionalGeneration"
    config_class = ChatGLMConfig
    task_name = "glm_blank"
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 150528),
        "num_layers": ("num_layers", 28),
        "hidden_size": ("hidden_size", 4096),
        "num_attention_heads": ("num_attention_heads", 32),
        "inner_hidden_size": ("ffn_hidden_size", 16384),
        "max_sequence_length": ("max_positions", 2048),
        "layernorm_epsilon": ("layer_norm_eps", 1e-5),
        "tie_word_embeddings": ("tie_embeddings", True),
    }
    fixed: ClassVar[dict[str, Any]] = {
        "position_encoding_2d": True,
        "pre_seq_len": None,
        "prefix_projection": (False, None),
        "quantization_bit": (0, None),
    }
    ignored = ("mask_token_id", "gmask_token_id")
    token_roles: ClassVar[dict[str, str]] = {
        "bos_token_id": "sop",
        "eos_token_id": "eop",
        "mask_token_id": "mask",
        "gmask_token_id": "gmask",
    }
    embedding = _EMBEDDING
    prefix = "transformer."
    renames = (
        *_SHARED,
        *weight_and_bias("layers.*.feed_forward.inner", f"{_LAYER}mlp.dense_h_to_4h"),
        Rename(("head.weight",), (_HEAD,)),
    )
    buffers = (f"{_LAYER}attention.rotary_emb.inv_freq",)

    def matches(self, config: dict[str, Any]) -> bool:
        """ChatGLM2 and 3 have the same `model_type`, and a key more."""
        return super().matches(config) and "padded_vocab_size" not in config

    def fitted(self, config: ChatGLMConfig, stored: Callable[[], LazyTensors]) -> ChatGLMConfig:
        """Two matrices that differ are both kept, whatever config.json says."""
        tensors = stored()
        is_one = _HEAD not in tensors.described or (config.tie_embeddings and not tensors.differ(_HEAD, _EMBEDDING))
        return dataclasses.replace(config, tie_embeddings=is_one)

    def config_to(self, config: ChatGLMConfig) -> dict[str, Any]:
        if not config.block_positions or config.gmask_runs_on:
            raise UserError("the form of ChatGLM has no place for other than 2-D positions")
        return {**super().config_to(config), "inner_hidden_size": config.inner_size}
