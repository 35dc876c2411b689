"""GLM in Hugging Face's form: the original's names behind "glm.", with a config.json."""

from __future__ import annotations

from typing import Any, ClassVar

from ftk.models.conversion import FamilyConverter
from ftk.models.glm import GLMConfig
from ftk.models.glm.convert import RENAMES
from ftk.registry import register_hf_model


@register_hf_model("glm")
class GLMConverter(FamilyConverter):
    """The hosted code computes the exact GELU, the original its tanh form; `activation`, which only ftk reads, says it.

    Both have been used with the published weights: logits differ in the third decimal.
    """

    model_type = "glm"
    architecture = "GLMForConditionalGeneration"
    config_class = GLMConfig
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 30592),
        "num_layers": ("num_layers", 24),
        "hidden_size": ("hidden_size", 1024),
        "num_attention_heads": ("num_attention_heads", 16),
        "max_sequence_length": ("max_positions", 512),
        "block_position_encoding": ("block_positions", True),
        "embedding_dropout_prob": ("embedding_dropout", 0.1),
        "attention_dropout_prob": ("attention_dropout", 0.1),
        "output_dropout_prob": ("dropout", 0.1),
        "initializer_range": ("init_std", 0.02),
        "activation": ("activation", "gelu"),
    }
    fixed: ClassVar[dict[str, Any]] = {"relative_encoding": False, "spell_length": None}
    ignored = (
        *("attention_scale", "output_predict", "parallel_output", "pool_token", "spell_func"),
        *("checkpoint_activations", "checkpoint_num_layers"),
    )
    vocabularies: ClassVar[dict[str, str]] = {
        "vocab.txt": "bert_wordpiece",
        "vocab.json": "gpt2_bpe",
        "cog-pretrain.model": "sentencepiece",
    }
    embedding = "glm.word_embeddings.weight"
    prefix = "glm."
    renames = tuple(rename._replace(theirs=tuple(f"glm.{name}" for name in rename.theirs)) for rename in RENAMES)

    def matches(self, config: dict[str, Any]) -> bool:
        """GLM-4 has the same `model_type`, and this key."""
        return super().matches(config) and "num_hidden_layers" not in config

    def task(self, config: GLMConfig) -> dict[str, Any]:
        return {"_name": "glm_blank", "seq_length": config.max_positions, "block_positions": config.block_positions}
