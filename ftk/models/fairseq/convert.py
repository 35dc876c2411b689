"""fairseq's Transformer in Hugging Face's form, FSMT: norms behind the sums and waves of positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.models.encoder_decoder.convert import POST_NORM, FairseqConverter, renames_of_layers
from ftk.models.fairseq import FairseqTransformerConfig
from ftk.models.renames import LazyTensors, Rename, weight_and_bias
from ftk.modules.embeddings import sinusoids
from ftk.registry import register_hf_model

_SOURCE, _TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
_HEAD = "model.decoder.output_projection.weight"
_TABLES = ("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight")
_PAD = "pad_token_id"


@register_hf_model("transformer")
class FSMTConverter(FairseqConverter):
    model_type = "fsmt"
    architecture = "FSMTForConditionalGeneration"
    config_class = FairseqTransformerConfig
    used: ClassVar[Mapping[str, tuple[str, Any]]] = {
        **{key: value for key, value in FairseqConverter.used.items() if key != "init_std"},
        "src_vocab_size": ("source_vocab_size", 42024),
        "tgt_vocab_size": ("vocab_size", 42024),
        "scale_embedding": ("scale_embeddings", True),
        "activation_function": ("activation", "relu"),
    }
    fixed: ClassVar[dict[str, Any]] = {
        "normalize_embedding": (False, None),
        "static_position_embeddings": (True, None),
        **POST_NORM,
    }
    ignored: ClassVar[Sequence[str]] = (
        *FairseqConverter.ignored,
        "langs",
        "decoder",
        "vocab_size",
        "tie_word_embeddings",
        "init_std",
    )
    embedding = _TARGET
    task_name = "translation"
    renames = (
        Rename(("token_embedding.weight",), (_TARGET,)),
        Rename(("source_embedding.weight",), (_SOURCE,)),
        *renames_of_layers(),
        # Where norms stand before the parts, which FSMT itself has not.
        *weight_and_bias("stacks.encoder.final_norm", "model.encoder.layer_norm"),
        *weight_and_bias("stacks.decoder.final_norm", "model.decoder.layer_norm"),
        Rename(("head.weight",), (_HEAD,)),
    )

    def constants(self, config: FairseqTransformerConfig) -> LazyTensors:
        """The waves of positions as tables, with a row of zeros for padding."""
        rows, size = config.max_positions + config.first_position, config.hidden_size

        def read(name: str) -> Tensor:
            table = sinusoids(torch.arange(rows), size)
            table[config.first_position - 1] = 0.0
            return table

        return LazyTensors(dict.fromkeys(_TABLES, torch.empty(rows, size, device="meta")), read)

    def tied(self, config: FairseqTransformerConfig) -> Mapping[str, str]:
        head = {_HEAD: _TARGET} if config.share_embeddings != "none" else {}
        return head | ({_SOURCE: _TARGET} if config.share_embeddings == "all" else {})

    def copied(self, config: FairseqTransformerConfig) -> Sequence[str]:
        """The output layer of a model whose source has another embedding: FSMT ties all three or none."""
        return [_HEAD] if config.share_embeddings == "decoder" else []

    def config_from(self, config: dict[str, Any]) -> FairseqTransformerConfig:
        pad = config.get(_PAD, 1)
        if not isinstance(pad, int) or pad < 0:
            raise UserError(f"config.json: {_PAD} is {pad!r:.60}; it must be a token, after which positions start")
        found = super().config_from(config)
        if found.decoder_start_token == pad:
            raise UserError(
                f"config.json: decoder_start_token_id and {_PAD} are both {pad}; transformers would treat the "
                "decoder's start token as padding"
            )
        return dataclasses.replace(found, share_embeddings="none", first_position=pad + 1)

    def fitted(self, config: FairseqTransformerConfig, stored: Callable[[], LazyTensors]) -> FairseqTransformerConfig:
        """What is one matrix is what the files have once, or with the same numbers."""
        tensors = stored()
        if config.source_rows == config.vocab_size:  # the files do not tell two vocabularies of one size from one
            config = dataclasses.replace(config, source_vocab_size=None)
        if tensors.differ(_HEAD, _TARGET):
            return config
        if tensors.differ(_SOURCE, _TARGET):
            return dataclasses.replace(config, share_embeddings="decoder")
        return dataclasses.replace(config, share_embeddings="all", source_vocab_size=None)

    def config_to(self, config: FairseqTransformerConfig) -> dict[str, Any]:
        sizes = {"src_vocab_size": config.source_rows}
        ends = {_PAD: config.first_position - 1, "tie_word_embeddings": config.share_embeddings == "all"}
        return {**super().config_to(config), **sizes, **ends, "langs": ["source", "target"]}
