"""Encoder-decoders in Hugging Face's form: what BART's and FSMT's files, which come from fairseq, have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from ftk.errors import UserError
from ftk.models.conversion import FamilyConverter, fields_from
from ftk.models.renames import Layout, Rename, SeparateHeads, SeparateKeysAndValues, weight_and_bias, weights_and_biases

_PREFIX = "model."
_LAYERS = "num_hidden_layers"
_FORCED = "force_bos_token_to_be_generated"
"""Key of older files: true where `bos` is the forced first token."""


POST_NORM: Mapping[str, Any] = {
    "is_decoder": False,
    "normalize_before": (False, None),
    "add_final_layer_norm": (False, None),
    "add_bias_logits": (False, None),
    "do_blenderbot_90_layernorm": (False, None),
}
"""Keys of older files, with the values that stand for norms behind the sums."""


@dataclasses.dataclass(frozen=True)
class OfDecoder:
    """A layout of as many heads as the decoder has."""

    layout: Layout

    def join(self, theirs: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return self.layout.join(theirs, self._options(config))

    def split(self, ours: Sequence[Tensor], config: Any) -> Sequence[Tensor]:
        return self.layout.split(ours, self._options(config))

    def _options(self, config: Any) -> Any:
        return dataclasses.replace(config, num_attention_heads=config.decoder_heads)


def renames_of_layers() -> tuple[Rename, ...]:
    """The layers of both stacks."""
    return (*_layers("encoder"), *_layers("decoder"), *_cross_attention())


def _layers(side: str) -> tuple[Rename, ...]:
    ours, theirs = f"stacks.{side}.layers.*", f"{_PREFIX}{side}.layers.*"
    return (
        *weights_and_biases(
            [f"{ours}.attention.qkv"],
            [f"{theirs}.self_attn.{part}_proj" for part in "qkv"],
            SeparateHeads() if side == "encoder" else OfDecoder(SeparateHeads()),
        ),
        *weight_and_bias(f"{ours}.attention.output", f"{theirs}.self_attn.out_proj"),
        *weight_and_bias(f"{ours}.attention_norm", f"{theirs}.self_attn_layer_norm"),
        *weight_and_bias(f"{ours}.feed_forward.inner", f"{theirs}.fc1"),
        *weight_and_bias(f"{ours}.feed_forward.output", f"{theirs}.fc2"),
        *weight_and_bias(f"{ours}.feed_forward_norm", f"{theirs}.final_layer_norm"),
    )


def _cross_attention() -> tuple[Rename, ...]:
    ours, theirs = "stacks.decoder.layers.*.cross_attention", f"{_PREFIX}decoder.layers.*.encoder_attn"
    return (
        *weight_and_bias(f"{ours}.query", f"{theirs}.q_proj"),
        *weights_and_biases(
            [f"{ours}.key_value"], [f"{theirs}.{part}_proj" for part in "kv"], OfDecoder(SeparateKeysAndValues())
        ),
        *weight_and_bias(f"{ours}.output", f"{theirs}.out_proj"),
        *weight_and_bias(f"{ours}_norm", f"{theirs}_layer_norm"),
    )


class FairseqConverter(FamilyConverter):
    """One family. A subclass gives its names, and where its config.json differs the rest."""

    prefix = _PREFIX
    ignored: ClassVar[Sequence[str]] = (
        *("classifier_dropout", "decoder_layerdrop"),
        *("forced_eos_token_id", _LAYERS, "num_labels", "max_length"),
        # Of older files.
        *("classif_dropout", "encoder_emd_tok_dim", "extra_pos_embeddings", "_num_labels", _FORCED),
        *("replacing_rate", "save_step", "kobart_version"),
    )
    token_roles: ClassVar[Mapping[str, str]] = {"forced_eos_token_id": "eos"}
    used: ClassVar[Mapping[str, tuple[str, Any]]] = {
        "d_model": ("hidden_size", 1024),
        "encoder_layers": ("num_layers", 12),
        "decoder_layers": ("num_decoder_layers", 12),
        "encoder_attention_heads": ("num_attention_heads", 16),
        "decoder_attention_heads": ("num_decoder_attention_heads", 16),
        "encoder_ffn_dim": ("ffn_hidden_size", 4096),
        "decoder_ffn_dim": ("decoder_ffn_hidden_size", 4096),
        "max_position_embeddings": ("max_positions", 1024),
        "dropout": ("dropout", 0.1),
        "attention_dropout": ("attention_dropout", 0.0),
        "activation_dropout": ("activation_dropout", 0.0),
        "encoder_layerdrop": ("layer_drop", 0.0),
        "init_std": ("init_std", 0.02),
        "decoder_start_token_id": ("decoder_start_token", 2),
        "forced_bos_token_id": ("forced_first_token", None),
    }

    def config_from(self, config: dict[str, Any]) -> Any:
        values = fields_from(config, self.used, self.fixed, self.ignored)
        if config.get(_LAYERS) not in (None, values["num_layers"]):
            raise UserError(
                f"config.json: {_LAYERS} is {config[_LAYERS]!r:.60}, encoder_layers {values['num_layers']!r:.60}; "
                "transformers reads both as the number of encoder layers, so give them the same value"
            )
        if config.get(_FORCED) and values["forced_first_token"] is None:
            values["forced_first_token"] = config.get("bos_token_id", 0)
        return self.config_class(**values, embedding_dropout=values["dropout"])

    def config_to(self, config: Any) -> dict[str, Any]:
        if config.embedding_dropout != config.dropout:
            raise UserError("Hugging Face's form has one dropout; give `embedding_dropout` the value of `dropout`")
        written = super().config_to(dataclasses.replace(config, num_decoder_layers=config.decoder_layers))
        widths = {"encoder_ffn_dim": config.inner_size, "decoder_ffn_dim": config.decoder_inner_size}
        return {
            **written,
            **widths,
            "decoder_attention_heads": config.decoder_heads,
            "decoder_layerdrop": config.layer_drop,
        }
