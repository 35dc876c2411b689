"""BART in Hugging Face's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ftk.models.bart import BartConfig
from ftk.models.encoder_decoder.convert import POST_NORM, FairseqConverter, renames_of_layers
from ftk.models.renames import LazyTensors, Rename, weight_and_bias
from ftk.registry import register_hf_model

_EMBEDDING, _BIAS = "model.shared.weight", "final_logits_bias"
_SOURCE, _TARGET = (f"model.{side}.embed_tokens.weight" for side in ("encoder", "decoder"))


class RowVector:
    """A vector that they keep as a matrix of one row."""

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [theirs[0].squeeze(0)]

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return [ours[0][None]]


@register_hf_model("bart")
class BartConverter(FairseqConverter):
    model_type = "bart"
    architecture = "BartForConditionalGeneration"
    config_class = BartConfig
    used: ClassVar[Mapping[str, tuple[str, Any]]] = {
        **FairseqConverter.used,
        "vocab_size": ("vocab_size", 50265),
        "activation_function": ("activation", "gelu"),
        "scale_embedding": ("scale_embeddings", False),
        "tie_word_embeddings": ("tie_embeddings", True),
    }
    fixed: ClassVar[dict[str, Any]] = {
        "normalize_embedding": (True, None),
        "static_position_embeddings": (False, None),
        **POST_NORM,
    }
    embedding = _EMBEDDING
    output_layer = ("output_layer.",)
    task_name = "denoising"
    renames = (
        Rename(("token_embedding.weight",), (_EMBEDDING,)),
        # Of models with three matrices of tokens, whose shared one is read by none.
        Rename(("token_embedding.weight",), (_TARGET,)),
        Rename(("source_embedding.weight",), (_SOURCE,)),
        Rename(("output_layer.weight",), ("lm_head.weight",)),
        *(
            each
            for side in ("encoder", "decoder")
            for each in (
                Rename((f"stacks.{side}.position_embedding.weight",), (f"model.{side}.embed_positions.weight",)),
                *weight_and_bias(f"stacks.{side}.embedding_norm", f"model.{side}.layernorm_embedding"),
            )
        ),
        *renames_of_layers(),
        Rename(("logits_bias.bias",), (_BIAS,), RowVector()),
    )
    buffers = ("model.encoder.version", "model.decoder.version")  # of older files

    def tied(self, config: BartConfig) -> Mapping[str, str]:
        if not config.tie_embeddings:
            return {_EMBEDDING: _TARGET}
        return {_SOURCE: _EMBEDDING, _TARGET: _EMBEDDING, **super().tied(config)}

    def copied(self, config: BartConfig) -> Sequence[str]:
        return self.unread(config)

    def unread(self, config: BartConfig) -> Sequence[str]:
        return () if config.tie_embeddings else (_EMBEDDING,)

    def fitted(self, config: BartConfig, stored: Callable[[], LazyTensors]) -> BartConfig:
        return dataclasses.replace(config, logits_bias=_BIAS in stored().described)
