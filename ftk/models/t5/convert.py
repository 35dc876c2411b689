"""T5 and mT5 in Hugging Face's form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.models.conversion import ACTIVATIONS, FamilyConverter, fields_from
from ftk.models.renames import LazyTensors, Rename, SeparateHeads, SeparateKeysAndValues, weights
from ftk.models.t5 import MT5Config, T5Config
from ftk.registry import register_hf_model

_FORMS = {  # their name of a feed-forward network -> whether it is gated, their name of its activation, and ours
    "gated-gelu": (True, "gelu_new", "gelu_tanh"),  # of version 1.1; "gated-gelu_python" is the exact one
    **{f"gated-{theirs}": (True, theirs, ours) for theirs, ours in ACTIVATIONS.items() if theirs != "gelu"},
    **{theirs: (False, theirs, ours) for theirs, ours in ACTIVATIONS.items()},
}

_START = "decoder_start_token_id"
_HEAD, _EMBEDDING = "lm_head.weight", "shared.weight"
_COPIES = [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]


def _stack(side: str, last: int) -> tuple[Rename, ...]:
    """What both stacks have; `last`: number of the feed-forward network in a layer of theirs."""
    ours, theirs = f"stacks.{side}.layers.*", f"{side}.block.*.layer"
    attention, network = f"{theirs}.0.SelfAttention", f"{theirs}.{last}.DenseReluDense"
    table = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return (
        weights([f"stacks.{side}.position_bias"], [table]),
        weights([f"{ours}.attention_norm"], [f"{theirs}.0.layer_norm"]),
        weights([f"{ours}.attention.qkv"], [f"{attention}.{part}" for part in "qkv"], SeparateHeads()),
        weights([f"{ours}.attention.output"], [f"{attention}.o"]),
        weights([f"{ours}.feed_forward_norm"], [f"{theirs}.{last}.layer_norm"]),
        weights([f"{ours}.feed_forward.{part}" for part in ("gate", "inner")], [f"{network}.wi_0", f"{network}.wi_1"]),
        weights([f"{ours}.feed_forward.inner"], [f"{network}.wi"]),
        weights([f"{ours}.feed_forward.output"], [f"{network}.wo"]),
        weights([f"stacks.{side}.final_norm"], [f"{side}.final_layer_norm"]),
    )


def _cross_attention() -> tuple[Rename, ...]:
    ours, theirs = "stacks.decoder.layers.*.cross_attention", "decoder.block.*.layer.1"
    attention = f"{theirs}.EncDecAttention"
    return (
        weights([f"{ours}_norm"], [f"{theirs}.layer_norm"]),
        weights([f"{ours}.query"], [f"{attention}.q"]),
        weights([f"{ours}.key_value"], [f"{attention}.k", f"{attention}.v"], SeparateKeysAndValues()),
        weights([f"{ours}.output"], [f"{attention}.o"]),
    )


@register_hf_model("t5")
class T5Converter(FamilyConverter):
    model_type = "t5"
    architecture = "T5ForConditionalGeneration"
    config_class: ClassVar[type[T5Config]] = T5Config
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        "vocab_size": ("vocab_size", 32128),
        "d_model": ("hidden_size", 512),
        "d_kv": ("head_dim", 64),
        "d_ff": ("ffn_hidden_size", 2048),
        "num_layers": ("num_layers", 6),
        "num_decoder_layers": ("num_decoder_layers", None),
        "num_heads": ("num_attention_heads", 8),
        "n_positions": ("max_positions", 512),
        "relative_attention_num_buckets": ("num_position_buckets", 32),
        "relative_attention_max_distance": ("max_position_distance", 128),
        "dropout_rate": ("dropout", 0.1),
        "layer_norm_epsilon": ("layer_norm_eps", 1e-6),
        "initializer_factor": ("init_std", 1.0),
        _START: ("decoder_start_token", 0),
        "forced_bos_token_id": ("forced_first_token", None),
    }
    fixed: ClassVar[dict[str, Any]] = {"is_decoder": False, "is_encoder_decoder": True}
    ignored = ("feed_forward_proj", "tie_word_embeddings", "scale_decoder_outputs", "classifier_dropout", "output_past")
    embedding = _EMBEDDING
    task_name = "span_corruption"
    token_roles: ClassVar[Mapping[str, str]] = {_START: "pad"}
    prefix = ""
    renames = (
        weights(["token_embedding"], ["shared"]),
        *_stack("encoder", 1),
        *_stack("decoder", 2),
        *_cross_attention(),
        weights(["head"], ["lm_head"]),
    )
    # Of older files; there is no position between two texts.
    buffers = ("decoder.block.*.layer.1.EncDecAttention.relative_attention_bias.weight",)

    def tied(self, config: T5Config) -> Mapping[str, str]:
        return {**dict.fromkeys(_COPIES, _EMBEDDING), **super().tied(config)}

    def config_from(self, config: dict[str, Any]) -> T5Config:
        form = config.get("feed_forward_proj", "gated-gelu" if self.config_class.gated else "relu")
        if not isinstance(form, str) or form not in _FORMS:
            known = " or ".join(map(repr, ACTIVATIONS))
            raise UserError(
                f"config.json: feed_forward_proj is {form!r:.60}; ftk's model has {known}, also with 'gated-' before it"
            )
        gated, activation, ours = _FORMS[form]
        fixed = {**self.fixed, "is_gated_act": gated, "dense_act_fn": activation}
        values = dict(fields_from(config, self.used, fixed, self.ignored))
        rate = values["dropout"]
        if not isinstance(rate, float | int) or not 0 <= rate < 1:
            raise UserError(f"config.json: dropout_rate is {rate!r:.60}; it must be at least 0 and below 1")
        values |= dict.fromkeys(("embedding_dropout", "attention_dropout", "activation_dropout"), rate)
        values["scale_outputs"] = self.scales(config)
        values["gate_activation" if gated else "plain_activation"] = ours
        return self.config_class(**values, gated=gated)

    def scales(self, config: Mapping[str, Any]) -> bool:
        """Whether a config.json asks for scaled outputs; before 5.0 `transformers` wrote that as tied embeddings."""
        if "scale_decoder_outputs" in config:
            return bool(config["scale_decoder_outputs"])
        return config.get("tie_word_embeddings") is not False

    def fitted(self, config: T5Config, stored: Callable[[], LazyTensors]) -> T5Config:
        """The files have an output layer of their own, or a copy of the embedding, which may stand alone; the
        config.json does not tell."""
        found = stored()
        is_alone = found.described.keys().isdisjoint((_EMBEDDING, *_COPIES))
        return dataclasses.replace(config, tie_embeddings=is_alone or not found.differ(_HEAD, _EMBEDDING))

    def config_to(self, config: T5Config) -> dict[str, Any]:
        if {config.embedding_dropout, config.attention_dropout, config.activation_dropout} != {config.dropout}:
            raise UserError(
                "Hugging Face's form has one dropout; give `embedding_dropout`, `attention_dropout` and "
                "`activation_dropout` the value of `dropout`"
            )
        made = (config.gated, config.activation)
        form = next(name for name, (gated, _, activation) in _FORMS.items() if (gated, activation) == made)
        own = {"feed_forward_proj": form, "is_gated_act": config.gated, "dense_act_fn": _FORMS[form][1]}
        sizes = {"num_decoder_layers": config.decoder_layers, "d_ff": config.inner_size}
        written = {**super().config_to(config), **own, **sizes, **self.outputs(config)}
        if config.decoder_start_token is None:  # then it is that of the tokenizer's role
            del written[_START]
        return written

    def outputs(self, config: T5Config) -> dict[str, Any]:
        """Keys of a config.json that say what the output layer is."""
        return {"scale_decoder_outputs": config.scale_outputs, "tie_word_embeddings": config.scale_outputs}


@register_hf_model("mt5")
class MT5Converter(T5Converter):
    model_type = "mt5"
    architecture = "MT5ForConditionalGeneration"
    config_class = MT5Config
    used: ClassVar[dict[str, tuple[str, Any]]] = {
        **T5Converter.used,
        "vocab_size": ("vocab_size", 250112),
        "d_ff": ("ffn_hidden_size", 1024),
        "num_layers": ("num_layers", 8),
        "num_heads": ("num_attention_heads", 6),
    }

    def scales(self, config: Mapping[str, Any]) -> bool:
        return False

    def outputs(self, config: T5Config) -> dict[str, Any]:
        return {"tie_word_embeddings": config.tie_embeddings}
