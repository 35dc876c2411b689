"""Writes checkpoints as fairseq does, from models of `transformers`, whose names come from fairseq's, or from ftk's.

facebookresearch/fairseq: fairseq/trainer.py `state_dict`, fairseq/checkpoint_utils.py, fairseq/models; and, in
huggingface/transformers, convert_{fsmt,bart,roberta,opt}_original_pytorch_checkpoint_to_pytorch.py (names).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import omegaconf
import pytest
import torch
from torch import Tensor, nn

from ftk.models import build_model
from ftk.models.renames import LazyTensors, renamed
from ftk.registry import HF_MODELS

transformers = pytest.importorskip("transformers", reason="needs transformers (pip install ftk[test])")

ROWS, SOURCE_ROWS = 32, 24  # of dictionaries, the four special symbols included
_PLACES = {  # parts of a layer: of RoBERTa in `transformers` -> fairseq's
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}
_ROBERTA = {
    "roberta.embeddings.word_embeddings": "sentence_encoder.embed_tokens",
    "roberta.embeddings.position_embeddings": "sentence_encoder.embed_positions",
    "roberta.embeddings.LayerNorm": "sentence_encoder.layernorm_embedding",
    "roberta.encoder.layer": "sentence_encoder.layers",
    "lm_head.decoder": "lm_head",
}
_ENDS = {  # of the others
    "lm_head.": "decoder.output_projection.",
    "decoder.final_layer_norm.": "decoder.layer_norm.",
    "decoder.project_in.": "decoder.project_in_dim.",
    "decoder.project_out.": "decoder.project_out_dim.",
}


def redrawn(model: nn.Module) -> nn.Module:
    """The model with random numbers in all parameters but waves of positions, so that no part is without effect."""
    generator = torch.Generator().manual_seed(5)
    is_fsmt = "FSMT" in type(model).__name__
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_fsmt and "embed_positions" in name:
                continue
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model.eval()


def from_transformers(model: nn.Module) -> dict[str, Tensor]:
    """The state dict under fairseq's names."""
    is_roberta = hasattr(model, "roberta")
    if is_roberta:
        nn.init.zeros_(model.roberta.embeddings.token_type_embeddings.weight)
    found = {}
    for name, tensor in model.state_dict().items():
        if "token_type" in name or name.startswith(("model.shared", "final_logits_bias", "lm_head.decoder.bias")):
            continue
        if "embed_positions" in name and "FSMT" in type(model).__name__:
            found[name.removeprefix("model.").replace(".weight", "._float_tensor")] = torch.zeros(1)
            continue
        name = name.removeprefix("model.")
        for theirs, ours in ({**_ROBERTA, **_PLACES} if is_roberta else _ENDS).items():
            name = name.replace(theirs, ours, 1) if not is_roberta or f"{theirs}." in name else name
        found[f"encoder.{name}" if is_roberta else name] = tensor
    return found | {name: torch.tensor([3.0]) for name in ("encoder.version", "decoder.version")}


def from_ours(name: str, **options: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of ftk's that none of `transformers` computes, and its state dict under fairseq's names."""
    model = redrawn(build_model(name, **options))
    converter = HF_MODELS.get(name).target()
    theirs = renamed(LazyTensors.of(model.state_dict()), converter.renames, model.config, back=True).all()
    found = {}
    for full, tensor in theirs.items():
        short = full.removeprefix("model.")
        for old, new in _ENDS.items():
            short = short.replace(old, new, 1) if short.startswith(old) else short
        found[short] = tensor
    return model, found


def in_older_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of fairseq 0.6: a joint projection, numbered norms, and a RoBERTa that was a decoder."""
    older: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".q_proj." in name:
            parts = [state[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            older[name.replace("q_proj.", "in_proj_")] = torch.cat(parts)
            continue
        if ".k_proj." in name or ".v_proj." in name:
            continue
        last = "2" if "decoder.layers" in name and "sentence_encoder" not in name else "1"
        norms = {"self_attn_layer_norm": "0", "encoder_attn_layer_norm": "1", "final_layer_norm": last}
        for norm, number in norms.items():
            name = name.replace(f".{norm}.", f".layer_norms.{number}.") if ".layers." in name else name
        name = name.replace("layernorm_embedding", "emb_layer_norm") if "sentence_encoder" in name else name
        name = name.replace("encoder.", "decoder.", 1) if "sentence_encoder" in name or "lm_head" in name else name
        older["decoder.embed_out" if name == "decoder.output_projection.weight" else name] = tensor
    return older


class _Meter:
    """Of fairseq, which is there only while a file is written."""


@contextmanager
def _fairseqs_classes() -> Iterator[None]:
    names = [name for name in ("fairseq", "fairseq.meters") if name not in sys.modules]
    sys.modules.update({name: ModuleType(name) for name in names})
    _Meter.__module__ = "fairseq.meters"
    sys.modules["fairseq.meters"]._Meter = _Meter  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def write(
    path: Path, state: dict[str, Tensor], options: dict[str, Any], form: str = "cfg", more: dict[str, Any] | None = None
) -> Path:
    """Save a checkpoint; `form`: "args", "cfg" of a Namespace, "mapping", or "omegaconf"; `more`: other entries."""
    history = [{"criterion_name": "CrossEntropyCriterion", "num_updates": 123, "lr_scheduler_state": {"best": None}}]
    content: dict[str, Any] = {"args": None, "cfg": None, "model": state, "optimizer_history": history}
    content |= {"last_optimizer_state": {"state": {0: {"step": 1, "exp_avg": torch.zeros(2)}}}}
    task = {key: options[key] for key in ("source_lang", "target_lang", "data") if key in options}
    model = {**options, "_name": options.get("arch")}
    if form == "args":
        content |= {"args": argparse.Namespace(**options)}
    elif form == "cfg":
        content |= {"cfg": {"model": argparse.Namespace(**model), "task": {"_name": options["task"], **task}}}
    else:
        content |= {"cfg": {"model": model, "task": {"_name": options["task"], **task}}}
    if form == "omegaconf":
        content["cfg"]["model"]["decoder_input_dim"] = "${model.decoder_embed_dim}"
        content["cfg"] = omegaconf.OmegaConf.create(content["cfg"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with _fairseqs_classes():
        meter = _Meter()
        meter.__dict__ |= {"sum": 3.5, "count": 2}
        content |= {"extra_state": {"train_meters": {"loss": meter}, "val_loss": np.float64(3.5)}} | (more or {})
        torch.save(content, path, _use_new_zipfile_serialization=form != "args")
    return path


def write_dictionary(path: Path, num_rows: int, start: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{start}{number} {99 - number}\n" for number in range(num_rows - 4)))
    return path


ENCODER = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_layerdrop": 0.0,
    "dropout": 0.1,
    "attention_dropout": 0.0,
}
DECODER = {
    "decoder_embed_dim": 16,
    "decoder_ffn_embed_dim": 40,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "dropout": 0.1,
}
BOTH = {
    **ENCODER,
    **DECODER,
    **{"task": "translation", "source_lang": "de", "target_lang": "en", "activation_fn": "relu"},
    **{f"{side}_{name}": False for side in ("encoder", "decoder") for name in ("normalize_before", "learned_pos")},
    **{"max_source_positions": 64, "max_target_positions": 64, "decoder_layers": 2},
}
OF_BART = {
    **BOTH,
    **{"encoder_learned_pos": True, "decoder_learned_pos": True, "layernorm_embedding": True},
    **{"share_all_embeddings": True, "no_scale_embedding": True, "activation_fn": "gelu", "decoder_layers": 3},
}
_SHAPE = {"d_model": 16, "encoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 40}
_SHAPE |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "max_position_embeddings": 64}
_TOKENS = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}


def fsmt(source_rows: int, *, shared: bool = False) -> nn.Module:
    sizes = {"src_vocab_size": source_rows, "tgt_vocab_size": ROWS, "decoder_layers": 2}
    config = transformers.FSMTConfig(**_SHAPE, **_TOKENS, **sizes, tie_word_embeddings=shared)
    return redrawn(transformers.FSMTForConditionalGeneration(config))


def bart() -> nn.Module:
    config = transformers.BartConfig(**_SHAPE, **_TOKENS, decoder_layers=3, vocab_size=ROWS)
    return redrawn(transformers.BartForConditionalGeneration(config))


def roberta(**options: Any) -> nn.Module:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"max_position_embeddings": 66, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    config = transformers.RobertaConfig(**shape, vocab_size=ROWS, pad_token_id=1, **options)
    model = redrawn(transformers.RobertaForMaskedLM(config))
    model.lm_head.decoder.bias = model.lm_head.bias  # of an own matrix they have another one, which fairseq has not
    return model


def opt(**options: Any) -> nn.Module:
    shape = {"hidden_size": 16, "ffn_dim": 40, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = transformers.OPTConfig(**shape, vocab_size=ROWS, max_position_embeddings=64, **options)
    return redrawn(transformers.OPTForCausalLM(config))


LM = {
    **DECODER,
    **{"task": "language_modeling", "tokens_per_sample": 64, "activation_fn": "relu", "decoder_normalize_before": True},
}
GPT3 = {**LM, "decoder_learned_pos": True, "no_scale_embedding": True, "share_decoder_input_output_embed": True}
OF_ROBERTA = {**ENCODER, "task": "masked_lm", "activation_fn": "gelu", "max_positions": 64}
TWINS: dict[
    str, tuple[Callable[[], nn.Module], dict[str, Any]]
] = {  # the same model in `transformers`, and its options
    "transformer": (lambda: fsmt(SOURCE_ROWS), {**BOTH, "arch": "transformer_iwslt_de_en"}),
    "transformer, all shared": (
        lambda: fsmt(ROWS, shared=True),
        {**BOTH, "arch": "transformer_wmt_en_de_big_t2t", "share_all_embeddings": True},
    ),
    "bart": (bart, {**OF_BART, "arch": "bart_base", "task": "denoising"}),
    "transformer that is a bart": (bart, {**OF_BART, "arch": "transformer"}),
    "roberta": (roberta, {**OF_ROBERTA, "arch": "roberta_base"}),
    "roberta, untied": (
        lambda: roberta(tie_word_embeddings=False),
        {**OF_ROBERTA, "arch": "roberta", "untie_weights_roberta": True},
    ),
    "language model": (opt, {**GPT3, "arch": "transformer_lm_gpt3_small"}),
    "language model, narrow tokens": (
        lambda: opt(word_embed_proj_dim=12, do_layer_norm_before=False),
        {
            **GPT3,
            **{"arch": "transformer_lm", "decoder_normalize_before": False},
            **{"decoder_input_dim": 12, "decoder_output_dim": 12},
        },
    ),
}
