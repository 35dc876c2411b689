"""What the options of fairseq say about a model, and ftk's that say the same.

Sources, in facebookresearch/fairseq: fairseq/models/transformer (`TransformerConfig`, architectures), bart/model.py,
roberta/model.py and transformer_lm.py of fairseq/models, fairseq/utils.py (`get_activation_fn`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ftk.checkpoint.fairseq import MODELS
from ftk.errors import UserError

_ARCHITECTURES = {  # fairseq's models -> names of their sizes
    "transformer": r"transformer(_tiny|_iwslt_de_en|(_vaswani)?_wmt_en_(de|fr)(_big(_t2t)?)?)?",
    "bart": r"m?bart_(base|large)(_wmt20)?",
    "roberta": r"roberta(_base|_large|_prenorm)?|xlm",
    "transformer_lm": r"transformer_lm(_\w+)?",
}
_OFF = (  # change what a model computes, and are in none of ftk's
    *("adaptive_input", "adaptive_softmax_cutoff", "tie_adaptive_weights", "character_embeddings", "char_inputs"),
    *("no_token_positional_embeddings", "no_cross_attention", "cross_self_attention", "base_layers"),
    *("quant_noise_pq", "quant_noise_scalar", "scale_fc", "scale_attn", "scale_heads", "scale_resids"),
    *("encoder_xformers_att_config", "decoder_xformers_att_config"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "no_decoder_final_norm"),
    "alibi",  # of metaseq, whose files have fairseq's form
)
_PRUNED = ("mha_heads_to_keep", "ffn_blocks_to_remove")  # -1: not
_ACTIVATIONS = {"relu": "relu", "gelu": "gelu", "gelu_fast": "gelu_tanh", "gelu_accurate": "gelu_tanh"}
_SIZES = {  # theirs, behind the side -> ours
    "embed_dim": "hidden_size",
    "layers": "num_layers",
    "attention_heads": "num_attention_heads",
    "ffn_embed_dim": "ffn_hidden_size",
}
_OF_DECODER = {  # ours, of an encoder-decoder's encoder -> its decoder's
    "num_layers": "num_decoder_layers",
    "num_attention_heads": "num_decoder_attention_heads",
    "ffn_hidden_size": "decoder_ffn_hidden_size",
}
_OF_ROBERTA = {  # what its options are, those that older files do not have too
    "encoder_normalize_before": False,
    "encoder_learned_pos": True,
    "layernorm_embedding": True,
    "no_scale_embedding": True,
    "activation_fn": "gelu",
}
_EOS = 2  # what a decoder reads first
_ROWS_BEFORE = 2  # of a table of positions, for padding
_TASKS = {"translation": "translation", "translation_from_pretrained_bart": "translation", "denoising": "denoising"}

SOURCE, TARGET = "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"
"""Names of the token embeddings; a RoBERTa has the first."""


def model_options(
    theirs: Mapping[str, Any], tensors: Mapping[str, Tensor], fairseq_model: str | None
) -> tuple[str, dict[str, Any]]:
    """The name of ftk's model, and its options.

    Args:
        theirs: fairseq's options.
        tensors: of the checkpoint, by today's names of fairseq.
        fairseq_model: whose size the architecture is, if that is not one of fairseq's.

    Raises:
        UserError: an option that would change the model's answers and that ftk's cannot follow.
    """
    kind = _fairseq_model(theirs.get("arch"), fairseq_model)
    for name in (*_OFF, *_PRUNED):
        if theirs.get(name) and not (name in _PRUNED and theirs[name] == -1):
            raise UserError(f"its option {name} is {theirs[name]!r:.60}, which ftk's models do not have")
    if kind == "roberta":
        return _encoder(theirs, tensors)
    return _decoder(theirs, tensors) if kind == "transformer_lm" else _encoder_decoder(theirs, tensors)


def task_name(theirs: Mapping[str, Any], own: str) -> str:
    """The task of ftk that a model goes on with; `own`: that of its family."""
    name = theirs.get("task")
    return _TASKS.get(name, own) if isinstance(name, str) and own in _TASKS.values() else own


def _fairseq_model(arch: Any, given: str | None) -> str:
    found = next((name for name, sizes in _ARCHITECTURES.items() if re.fullmatch(sizes, str(arch))), None)
    if found is None and given is None:
        raise UserError(
            f"its architecture {arch!r:.60} is none of those that ftk reads ({', '.join(MODELS)} and their sizes); if "
            "it is a size of one of these under a name of your own, name that one with `fairseq_model`"
        )
    if given not in (None, found) and found is not None:
        raise UserError(f"its architecture {arch!r:.60} is fairseq's {found}; leave out `fairseq_model` {given}")
    return found or str(given)


def _encoder_decoder(theirs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    for name in ("embed_dim", "normalize_before", "learned_pos"):
        ours, other = f"encoder_{name}", f"decoder_{name}"
        if theirs.get(ours) != theirs.get(other):
            raise UserError(
                f"its option {ours} is {theirs.get(ours)!r:.40}, {other} {theirs.get(other)!r:.40}; ftk's models have "
                "one value for both"
            )
    for name in ("decoder_input_dim", "decoder_output_dim"):
        if theirs.get(name) not in (None, theirs.get("decoder_embed_dim")):
            raise UserError(f"its option {name} is {theirs[name]!r:.40}; ftk's models have decoder_embed_dim")
    decoder = {_OF_DECODER[ours]: value for ours, value in _sizes(theirs, "decoder").items() if ours in _OF_DECODER}
    target, source = _rows(tensors, TARGET), _rows(tensors, SOURCE)
    options = {
        **_shared(theirs, "encoder"),
        **_sizes(theirs, "encoder"),
        **decoder,
        "activation_dropout": theirs.get("activation_dropout") or theirs.get("relu_dropout") or 0.0,
        "decoder_start_token": _EOS,
        "scale_embeddings": not theirs.get("no_scale_embedding"),
        "vocab_size": target,
    }
    learned, norm, first = (
        bool(theirs.get(name)) for name in ("encoder_learned_pos", "layernorm_embedding", "encoder_normalize_before")
    )
    if (learned, norm, first) == (True, True, False):
        if not theirs.get("share_all_embeddings"):
            raise UserError("its option share_all_embeddings is off; ftk's models with learned positions share all")
        tables = {_rows(tensors, f"{side}.embed_positions.weight") - _ROWS_BEFORE for side in ("encoder", "decoder")}
        if len(tables) > 1:
            raise UserError("max_source_positions and max_target_positions differ; ftk's bart has one max_positions")
        return "bart", options | {"max_positions": tables.pop(), "tie_embeddings": True}
    if learned or norm:
        raise UserError(
            f"its options encoder_learned_pos, layernorm_embedding and encoder_normalize_before are {learned}, {norm} "
            f"and {first}; ftk reads True, True and False (as of a BART), or models with the first two off"
        )
    shared = "decoder" if theirs.get("share_decoder_input_output_embed") else "none"
    shared = "all" if theirs.get("share_all_embeddings") else shared
    most = [theirs.get(f"max_{side}_positions") for side in ("source", "target")]
    return "transformer", options | {
        "norm_first": first,
        "share_embeddings": shared,
        "source_vocab_size": None if source == target else source,  # one size is taken for one dictionary
        "max_positions": max((positions for positions in most if isinstance(positions, int)), default=1024),
    }


def _encoder(theirs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    for name, wanted in _OF_ROBERTA.items():
        if (found := theirs.get(name, wanted)) != wanted:
            raise UserError(f"its option {name} is {found!r:.40}; ftk's roberta has {wanted!r}")
    return "roberta", {
        **_shared(theirs, "encoder"),
        **_sizes(theirs, "encoder"),
        "activation": "gelu",
        "tie_embeddings": not theirs.get("untie_weights_roberta"),
        "vocab_size": _rows(tensors, SOURCE),
        "max_positions": _rows(tensors, "encoder.embed_positions.weight") - _ROWS_BEFORE,
    }


def _decoder(theirs: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """Of a causal language model: OPT comes from fairseq, too."""
    if theirs.get("layernorm_embedding"):
        raise UserError("its option layernorm_embedding is on; ftk's opt has no norm there")
    width = theirs.get("decoder_embed_dim")
    outer = [theirs.get(name) or width for name in ("decoder_input_dim", "decoder_output_dim")]
    if outer[0] != outer[1]:
        raise UserError(
            f"its options decoder_input_dim and decoder_output_dim are {outer[0]} and {outer[1]}; ftk's "
            "opt has one width of both"
        )
    learned = bool(theirs.get("decoder_learned_pos"))
    most = theirs.get("max_target_positions") or theirs.get("tokens_per_sample") or 1024
    return "opt", {
        **_shared(theirs, "decoder"),
        **_sizes(theirs, "decoder"),
        "norm_first": bool(theirs.get("decoder_normalize_before", "decoder.layer_norm.weight" in tensors)),
        "tie_embeddings": bool(theirs.get("share_decoder_input_output_embed")),
        "scale_embeddings": not theirs.get("no_scale_embedding"),
        "word_embedding_size": None if outer[0] == width else outer[0],
        "learned_positions": learned,
        "vocab_size": _rows(tensors, TARGET),
        "max_positions": _rows(tensors, "decoder.embed_positions.weight") - _ROWS_BEFORE if learned else most,
    }


def _shared(theirs: Mapping[str, Any], side: str) -> dict[str, Any]:
    """What all families have."""
    name = theirs.get("activation_fn") or "relu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise UserError(f"its option activation_fn is {name!r:.40}; ftk's models have {', '.join(_ACTIVATIONS)}")
    dropout = theirs.get("dropout") or 0.0
    return {
        "activation": _ACTIVATIONS[name],
        "dropout": dropout,
        "embedding_dropout": dropout,
        "attention_dropout": theirs.get("attention_dropout") or 0.0,
        "layer_drop": theirs.get(f"{side}_layerdrop") or 0.0,
    }


def _sizes(theirs: Mapping[str, Any], side: str) -> dict[str, Any]:
    if missing := [name for name in _SIZES if theirs.get(f"{side}_{name}") is None]:
        raise UserError(f"its options have no {side}_{missing[0]}")
    return {ours: theirs[f"{side}_{name}"] for name, ours in _SIZES.items()}


def _rows(tensors: Mapping[str, Tensor], name: str) -> int:
    if name not in tensors or tensors[name].dim() != 2:
        raise UserError(f"there is no matrix {name!r}")
    return len(tensors[name])
