"""Decoders with rotary positions in Hugging Face's form: what LLaMA's, Mistral's and Qwen's files have in common."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from ftk.errors import UserError
from ftk.models.conversion import FamilyConverter, fields_from
from ftk.models.renames import Rename, SeparateHeads, weights_and_biases
from ftk.models.rotary.config import RotaryConfig

_LAYER = "model.layers.*."
_HEADS = [f"{_LAYER}self_attn.{part}_proj" for part in "qkv"]
_LENGTH = "max_position_embeddings"
_EXACT_LENGTH = "max_sequence_length"  # FastChat's: of a stretched text; other programs do not read it
PARTIAL = "partial_rotary_factor"  # of each head; newer files have it in `rope_parameters`
USED: dict[str, tuple[str, Any]] = {  # their key -> ours, and what its absence means
    "vocab_size": ("vocab_size", 32000),
    "hidden_size": ("hidden_size", 4096),
    "intermediate_size": ("ffn_hidden_size", 11008),
    "num_hidden_layers": ("num_layers", 32),
    "num_attention_heads": ("num_attention_heads", 32),
    "num_key_value_heads": ("num_kv_heads", None),
    "head_dim": ("head_dim", None),
    _LENGTH: ("max_positions", 2048),
    "initializer_range": ("init_std", 0.02),
    "rms_norm_eps": ("layer_norm_eps", 1e-6),
    "attention_dropout": ("attention_dropout", 0.0),
    "tie_word_embeddings": ("tie_embeddings", False),
}
FIXED: dict[str, Any] = {
    "hidden_act": ("silu", "swish"),
    "mlp_bias": (False, None),
    "rope_interleaved": (False, None),
    PARTIAL: (1.0, None),
}
_FACTOR, _ORIGINAL = "factor", "original_max_position_embeddings"
_ROPE = {  # rope type -> their key -> ours
    "default": {},
    "linear": {_FACTOR: "rope_factor"},
    "dynamic": {_FACTOR: "rope_factor"},
    "llama3": {
        _FACTOR: "rope_factor",
        "low_freq_factor": "rope_low",
        "high_freq_factor": "rope_high",
        _ORIGINAL: "rope_original_positions",
    },
    "yarn": {
        _FACTOR: "rope_factor",
        "beta_slow": "rope_low",
        "beta_fast": "rope_high",
        "attention_factor": "rope_attention_factor",
        "truncate": "rope_whole_pairs",
        _ORIGINAL: "rope_original_positions",
    },
}


class RotaryConverter(FamilyConverter):
    """One family; a subclass gives its options and, where its config.json differs from LLaMA's, `used` and `fixed`."""

    used = USED
    fixed = FIXED
    ignored: ClassVar[Sequence[str]] = ("pretraining_tp", _EXACT_LENGTH)
    embedding = "model.embed_tokens.weight"
    prefix = "model."
    renames = (
        Rename(("token_embedding.weight",), ("model.embed_tokens.weight",)),
        *weights_and_biases(["layers.*.attention.qkv"], _HEADS, SeparateHeads()),
        *(
            Rename((f"layers.*.{ours}",), (f"{_LAYER}{theirs}",))
            for ours, theirs in {
                "attention_norm.weight": "input_layernorm.weight",
                "attention.query_norm.weight": "self_attn.q_norm.weight",
                "attention.key_norm.weight": "self_attn.k_norm.weight",
                "attention.output.weight": "self_attn.o_proj.weight",
                "attention.output.bias": "self_attn.o_proj.bias",
                "feed_forward_norm.weight": "post_attention_layernorm.weight",
                "feed_forward.gate.weight": "mlp.gate_proj.weight",
                "feed_forward.inner.weight": "mlp.up_proj.weight",
                "feed_forward.output.weight": "mlp.down_proj.weight",
                "feed_forward.gate.bias": "mlp.gate_proj.bias",
                "feed_forward.inner.bias": "mlp.up_proj.bias",
                "feed_forward.output.bias": "mlp.down_proj.bias",
            }.items()
        ),
        Rename(("final_norm.weight",), ("model.norm.weight",)),
        Rename(("head.weight",), ("lm_head.weight",)),
    )
    buffers = (f"{_LAYER}self_attn.rotary_emb.inv_freq",)  # of older files

    def config_from(self, config: dict[str, Any]) -> RotaryConfig:
        theirs = {key: value for key, value in config.items() if key not in _ROPE_KEYS}
        # Where a file has both, `transformers` takes the older key.
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if not isinstance(rope, dict):
            raise UserError(f"config.json: rope_scaling is {rope!r:.60}; it must be a mapping")
        rope = {"rope_theta": config.get("rope_theta", 10000.0), **rope}
        if PARTIAL in rope:
            theirs[PARTIAL] = rope.pop(PARTIAL)
        values = fields_from(theirs, self.used, self.fixed, self.ignored)
        return self.config_class(**values | _rope(rope, values["max_positions"], config.get(_EXACT_LENGTH)))

    def config_to(self, config: RotaryConfig) -> dict[str, Any]:
        theirs = super().config_to(config)
        theirs |= {"num_key_value_heads": config.kv_heads, "head_dim": config.head_size}
        theirs["intermediate_size"] = config.inner_size
        if config.rope_scaling == "linear":
            theirs[_LENGTH] = math.ceil(config.max_positions / config.rope_factor)
            if int(config.rope_factor * theirs[_LENGTH]) != config.max_positions:
                theirs[_EXACT_LENGTH] = config.max_positions
        # Newer releases read these two as well as their own `rope_parameters`, which older ones do not know.
        theirs["rope_theta"] = config.rope_theta
        if config.rope_scaling != "none":
            low, high = config.rope_turns
            resolved = {
                "rope_low": low,
                "rope_high": high,
                "rope_original_positions": config.rope_original_positions or config.max_positions,
            }
            names = _ROPE[config.rope_scaling]
            scaling = {key: resolved.get(name, getattr(config, name)) for key, name in names.items()}
            given = {key: value for key, value in scaling.items() if value is not None}
            theirs["rope_scaling"] = {"rope_type": config.rope_scaling, **given}
        return theirs


class QwenConverter(RotaryConverter):
    """What Qwen2's and Qwen3's files have in common: windows in the layers of `layer_types`, or from
    `max_window_layers` on.
    """

    used: ClassVar[dict[str, tuple[str, Any]]] = USED | {
        "vocab_size": ("vocab_size", 151936),
        "intermediate_size": ("ffn_hidden_size", 22016),
        "num_key_value_heads": ("num_kv_heads", 32),
        _LENGTH: ("max_positions", 32768),
        "sliding_window": ("sliding_window", 4096),
    }

    def config_from(self, config: dict[str, Any]) -> RotaryConfig:
        theirs = {key: value for key, value in config.items() if key not in _WINDOW_KEYS}
        uses, first, kinds = (config.get(key, default) for key, default in _WINDOW_KEYS.items())
        if not isinstance(kinds, list | None) or not isinstance(first, int):
            raise UserError("config.json: layer_types must be a list or null, and max_window_layers a whole number")
        if unknown := [kind for kind in kinds or () if kind not in _KINDS]:
            raise UserError(
                f"config.json: layer_types has {unknown[0]!r:.40}; ftk's models have {' and '.join(_KINDS)}"
            )
        found: Any = super().config_from(theirs)
        if not uses or found.sliding_window is None:
            return dataclasses.replace(found, sliding_window=None)
        if not isinstance(found.num_layers, int):
            raise UserError(f"config.json: num_hidden_layers is {found.num_layers!r:.40}; it must be a whole number")
        if kinds is None:
            windowed: Sequence[int] = range(max(first, 0), min(found.num_layers, _MAX_LAYERS))
        elif len(kinds) == found.num_layers:
            windowed = [number for number, kind in enumerate(kinds) if kind == _KINDS[True]]
        else:
            raise UserError(f"config.json: layer_types has {len(kinds)} entries for {found.num_layers} layers")
        if not windowed:
            return dataclasses.replace(found, sliding_window=None)
        if len(windowed) == found.num_layers:
            return found
        return dataclasses.replace(found, windowed_layers=list(windowed))

    def config_to(self, config: Any) -> dict[str, Any]:
        windowed = [number for number, window in enumerate(config.layer_windows) if window is not None]
        first = config.num_layers - len(windowed)
        windows: dict[str, Any] = {"use_sliding_window": bool(windowed), "max_window_layers": first}
        if windowed != list(range(first, config.num_layers)):
            windows["layer_types"] = [_KINDS[window is not None] for window in config.layer_windows]
        return {**super().config_to(config), **windows}


_KINDS = ("full_attention", "sliding_attention")
_MAX_LAYERS, _MAX_POSITIONS = 10**4, 10**8  # more are refused as a value of `num_layers` and `max_positions`
_WINDOW_KEYS: dict[str, Any] = {"use_sliding_window": False, "max_window_layers": 28, "layer_types": None}
_LENGTHENED = ("linear", "yarn")  # whose factor says how long a text may be
_ROPE_KEYS = ("rope_parameters", "rope_theta", "rope_scaling")


def _rope(given: dict[str, Any], positions: Any, exact: Any) -> dict[str, Any]:
    """Our options of rotary positions: of `rope_parameters`, or of the older `rope_theta` and `rope_scaling`.

    `positions`: longest text that config.json says. Under linear it is that of the pretraining, which the factor
    stretches, as for vLLM; yarn's is what it stretches the original one to, if that is longer.
    `exact`: `max_sequence_length`, which counts where linear's factor does not divide it and `positions` is rounded up.
    """
    theta = given.pop("rope_theta")
    kind, older = given.pop("rope_type", None), given.pop("type", None)
    kind = kind or older or "default"
    if not isinstance(kind, str) or kind not in _ROPE:
        raise UserError(f"config.json: rope_type is {kind!r:.40}; ftk's models have {', '.join(_ROPE)}")
    original = positions
    if kind == "yarn":
        original = given[_ORIGINAL] = given.get(_ORIGINAL) or positions
    if kind in _LENGTHENED:
        for key, value in ((_LENGTH, positions), (_ORIGINAL, original)):
            if not (isinstance(value, int | float) and value > 0):
                raise UserError(f"config.json: {key} is {value!r:.40}; it must be a whole number above 0")
    if kind == "yarn":
        given.pop("finetuned", None)  # a note in the first files of yarn
        if given.get(_FACTOR, 0) is None:
            given[_FACTOR] = positions / original
        if given.get("truncate", True) is None:
            given["truncate"] = False
        numerator, denominator = (given.pop(key, None) for key in ("mscale", "mscale_all_dim"))
        if numerator and denominator and given.get("attention_factor") is None:
            given["attention_factor"] = _mscale(given, numerator) / _mscale(given, denominator)
    names = _ROPE[kind]
    if unknown := given.keys() - names.keys():
        raise UserError(
            f"config.json: {min(unknown)} of the rope type {kind} is not known here; it might change the model's "
            "answers (if it does not, remove it from the file)"
        )
    for key in names.keys() & {_FACTOR, "low_freq_factor", "high_freq_factor"}:
        if not isinstance(given.get(key), int | float):
            raise UserError(
                f"config.json: {key} of the rope type {kind} is {given.get(key)!r:.40}; it must be a number"
            )
    found = {names[key]: value for key, value in given.items() if value is not None}
    if kind in _LENGTHENED:
        found["max_positions"] = max(positions, int(min(_MAX_POSITIONS, given[_FACTOR] * original)))
    is_length = isinstance(exact, int) and 1 <= exact <= _MAX_POSITIONS
    if kind == "linear" and is_length and given[_FACTOR] >= 1 and math.ceil(exact / given[_FACTOR]) == positions:
        found["max_positions"] = exact
    return {"rope_theta": theta, "rope_scaling": "none" if kind == "default" else kind, **found}


def _mscale(rope: dict[str, Any], scale: Any) -> float:
    """Part of yarn's factor of cosines and sines, as DeepSeek's files give it.

    Raises:
        UserError: one of the two values is no number.
    """
    factor = rope.get("factor")
    if not isinstance(factor, int | float) or not isinstance(scale, int | float):
        raise UserError(f"config.json: yarn has mscale {scale!r:.40} and factor {factor!r:.40}; they must be numbers")
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
