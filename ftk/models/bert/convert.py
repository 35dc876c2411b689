"""BERT in Hugging Face's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ftk.models.bert import BertConfig
from ftk.models.encoder.config import EncoderConfig
from ftk.models.encoder.convert import EncoderConverter, renames
from ftk.models.renames import LazyTensors
from ftk.registry import register_hf_model


@register_hf_model("bert")
class BertConverter(EncoderConverter):
    model_type = "bert"
    architecture = "BertForMaskedLM"
    config_class = BertConfig
    own: ClassVar[dict[str, tuple[str, Any]]] = {"vocab_size": ("vocab_size", 30522)}
    ignored: ClassVar[Sequence[str]] = (
        *EncoderConverter.ignored,
        # Of older files; of an output layer that has none of these parts here.
        *("directionality", "emb_size", "pre_trained", "training"),
        *(f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type")),
    )
    prefix = "bert."
    classifier: ClassVar[Mapping[str, str]] = {"dense": "bert.pooler.dense", "output": "classifier"}
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "cls.predictions.transform.dense",
        "norm": "cls.predictions.transform.LayerNorm",
        "bias": "cls.predictions.bias",
        "output": "cls.predictions.decoder",
        "pooler": "bert.pooler.dense",
        "next_sentence": "cls.seq_relationship",
    }
    renames = renames(prefix, head_names)
    buffers = ("bert.embeddings.position_ids",)  # of older files

    def fitted(self, config: EncoderConfig, stored: Callable[[], LazyTensors]) -> EncoderConfig:
        return dataclasses.replace(config, next_sentence="cls.seq_relationship.weight" in stored().described)

    def config_to(self, config: EncoderConfig) -> dict[str, Any]:
        architecture = "BertForPreTraining" if config.next_sentence else self.architecture
        return {**super().config_to(config), "architectures": [architecture]}
