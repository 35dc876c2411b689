"""Encoders in Hugging Face's form: what BERT's, RoBERTa's and Longformer's files have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.models.conversion import FamilyConverter
from ftk.models.encoder.config import EncoderConfig
from ftk.models.renames import Rename, SeparateHeads, weight_and_bias, weights_and_biases

_ROWS = "max_position_embeddings"
_USED: dict[str, tuple[str, Any]] = {  # their key -> ours, and what its absence means
    "hidden_size": ("hidden_size", 768),
    "num_hidden_layers": ("num_layers", 12),
    "num_attention_heads": ("num_attention_heads", 12),
    "intermediate_size": ("ffn_hidden_size", 3072),
    _ROWS: ("max_positions", 512),
    "type_vocab_size": ("type_vocab_size", 2),
    "hidden_dropout_prob": ("dropout", 0.1),
    "attention_probs_dropout_prob": ("attention_dropout", 0.1),
    "initializer_range": ("init_std", 0.02),
    "layer_norm_eps": ("layer_norm_eps", 1e-12),
    "hidden_act": ("activation", "gelu"),
    "tie_word_embeddings": ("tie_embeddings", True),
}
_FIXED: dict[str, Any] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": ("absolute", None),
}


def renames(trunk: str, head: Mapping[str, str]) -> tuple[Rename, ...]:
    """All parameters of an encoder.

    Args:
        trunk: what stands before their names, "bert.".
        head: part of `MaskedLMHead`, or "output" of the matrix behind it -> their name.
    """
    layer = f"{trunk}encoder.layer.*."
    heads = [f"{layer}attention.self.{part}" for part in ("query", "key", "value")]
    return (
        *(
            Rename((f"{ours}.weight",), (f"{trunk}embeddings.{theirs}_embeddings.weight",))
            for ours, theirs in {
                "token_embedding": "word",
                "position_embedding": "position",
                "type_embedding": "token_type",
            }.items()
        ),
        *weight_and_bias("embedding_norm", f"{trunk}embeddings.LayerNorm"),
        *weights_and_biases(["layers.*.attention.qkv"], heads, SeparateHeads()),
        *weight_and_bias("layers.*.attention.output", f"{layer}attention.output.dense"),
        *weight_and_bias("layers.*.attention_norm", f"{layer}attention.output.LayerNorm"),
        *weight_and_bias("layers.*.feed_forward.inner", f"{layer}intermediate.dense"),
        *weight_and_bias("layers.*.feed_forward.output", f"{layer}output.dense"),
        *weight_and_bias("layers.*.feed_forward_norm", f"{layer}output.LayerNorm"),
        *(
            rename
            for part in ("dense", "norm", "pooler", "next_sentence")
            if part in head
            for rename in weight_and_bias(f"lm_head.{part}", head[part])
        ),
        Rename(("lm_head.bias",), (head["bias"],)),
        # Of a matrix of its own, beside which they have that bias too, and do not read it.
        Rename(("lm_head.bias",), (f"{head['output']}.bias",)),
        Rename(("output_layer.weight",), (f"{head['output']}.weight",)),
    )


class EncoderConverter(FamilyConverter):
    """One family. A subclass gives its names, and where its config.json differs the rest.

    Attributes:
        own: keys besides those of all encoders, as `used` of `FamilyConverter`.
        head_names: as of `renames`.
    """

    prefix: str
    own: ClassVar[dict[str, tuple[str, Any]]]
    fixed = _FIXED
    task_name = "masked_lm"
    output_layer = ("lm_head.", "output_layer.")
    ignored: ClassVar[Sequence[str]] = ("classifier_dropout",)
    older: Mapping[str, str] = {"gamma": "weight", "beta": "bias"}
    head_names: ClassVar[Mapping[str, str]]

    @property
    def used(self) -> Mapping[str, tuple[str, Any]]:  # type: ignore[override]
        return _USED | self.own

    def tied(self, config: EncoderConfig) -> Mapping[str, str]:
        output, bias = self.head_names["output"], self.head_names["bias"]
        if not config.tie_embeddings:
            return {bias: f"{output}.bias"}
        return {f"{output}.weight": f"{self.prefix}embeddings.word_embeddings.weight", f"{output}.bias": bias}

    def copied(self, config: EncoderConfig) -> Sequence[str]:
        return () if config.tie_embeddings else [self.head_names["bias"]]

    def unread(self, config: EncoderConfig) -> Sequence[str]:
        """The pooler, unless the output for pairs of texts reads it, and the bias of a tied output layer in others."""
        kinds = () if config.next_sentence else ("weight", "bias")
        return [*self.copied(config), *(f"{self.prefix}pooler.dense.{kind}" for kind in kinds)]

    def config_from(self, config: dict[str, Any]) -> EncoderConfig:
        found = super().config_from(config)
        pad = 0 if found.pad_token is None else found.pad_token
        for name, value in ((_ROWS, found.max_positions), ("pad_token_id", pad)):
            if not isinstance(value, int):
                raise UserError(f"config.json: {name} is {value!r:.40}; it must be a whole number")
        positions = found.max_positions - (found.position_rows - found.max_positions)
        return dataclasses.replace(found, embedding_dropout=found.dropout, max_positions=positions)

    def config_to(self, config: EncoderConfig) -> dict[str, Any]:
        if config.embedding_dropout != config.dropout:
            raise UserError("Hugging Face's form has one dropout; give `embedding_dropout` the value of `dropout`")
        sizes = {"intermediate_size": config.inner_size, _ROWS: config.position_rows}
        return {**super().config_to(config), **sizes}


class PaddedEncoderConverter(EncoderConverter):
    """A family with a `PaddedEncoderConfig`, whose files are named as RoBERTa's."""

    classifier: ClassVar[Mapping[str, str]] = {"dense": "classifier.dense", "output": "classifier.out_proj"}
    head_names: ClassVar[Mapping[str, str]] = {
        "dense": "lm_head.dense",
        "norm": "lm_head.layer_norm",
        "bias": "lm_head.bias",
        "output": "lm_head.decoder",
    }

    @property
    def buffers(self) -> Sequence[str]:  # type: ignore[override]
        """Positions, of older files."""
        return [f"{self.prefix}embeddings.position_ids"]
