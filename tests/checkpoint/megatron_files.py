"""Writes checkpoints as Megatron-LM does, from a model of ftk's: index by index, after its source.

NVIDIA/Megatron-LM: core/tensor_parallel/layers.py (rows and columns of a rank), core/transformer/attention.py and
megatron/checkpointing.py `fix_query_key_value_ordering` (order of the joint rows), core/transformer/mlp.py (gates in
the first half), core/pipeline_parallel (layers of a stage), training/checkpointing.py and legacy/model (files, names).
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from sys import modules
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ftk.models import build_model

LEGACY = {  # Megatron-Core's name of a layer's part -> that of another release
    "input_layernorm": "input_norm",
    "self_attention.linear_qkv": "self_attention.query_key_value",
    "self_attention.linear_proj": "self_attention.dense",
    "pre_mlp_layernorm": "post_attention_norm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h",
    "mlp.linear_fc2": "mlp.dense_4h_to_h",
}
FIRST = {
    **LEGACY,
    "input_layernorm": "input_layernorm",
    "self_attention.linear_qkv": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
ENGINE = {"input_layernorm": "self_attention.linear_qkv.layer_norm", "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm"}
LEGACY_ENGINE = {
    "input_layernorm": "self_attention.layernorm_qkv.layer_norm",
    "self_attention.linear_qkv": "self_attention.layernorm_qkv",
    "self_attention.linear_proj": "self_attention.proj",
    "pre_mlp_layernorm": "layernorm_mlp.layer_norm",
    "mlp.linear_fc1": "layernorm_mlp.fc1",
    "mlp.linear_fc2": "layernorm_mlp.fc2",
}


def drawn(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """A model of which every weight is random."""
    shape = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 128}
    shape |= {"vocab_size": 48, "max_positions": 24}
    model = build_model(name, **{**shape, **options}).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 4)
    return model


def arguments(model: nn.Module, ranks: int = 1, stages: int = 1, **changes: Any) -> argparse.Namespace:
    """Megatron's options for a model: those that say what it is, and some of the many others."""
    config: Any = model.config
    is_rotary = hasattr(config, "rope_theta")
    norms = any("query_norm" in name for name in model.state_dict())
    options = {
        "num_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.inner_size,
        "num_attention_heads": config.num_attention_heads,
        "kv_channels": config.head_size,
        "group_query_attention": config.kv_heads != config.num_attention_heads,
        "num_query_groups": config.kv_heads if config.kv_heads != config.num_attention_heads else 1,
        "max_position_embeddings": config.max_positions,
        "position_embedding_type": "rope" if is_rotary else "learned_absolute",
        "rotary_base": int(getattr(config, "rope_theta", 10000)),
        "normalization": "RMSNorm" if is_rotary else "LayerNorm",
        "norm_epsilon": config.layer_norm_eps,
        "swiglu": is_rotary,
        "add_bias_linear": not is_rotary,
        "add_qkv_bias": is_rotary and "layers.0.attention.qkv.bias" in model.state_dict(),
        "qk_layernorm": norms,
        "untie_embeddings_and_output_weights": not config.tie_embeddings,
        "bias_gelu_fusion": config.activation == "gelu_tanh",
        "hidden_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "init_method_std": config.init_std,
        "padded_vocab_size": config.vocab_size,
        "tensor_model_parallel_size": ranks,
        "pipeline_model_parallel_size": stages,
        "params_dtype": torch.float32,
        "data_path": ["a", "b"],
        "num_experts": None,
        "window_size": None,
        "lr": 6e-4,
    }
    return argparse.Namespace(**options | changes)


def joint_rows(config: Any, heads: range, version: int) -> list[int]:
    """Rows of ftk's [K, A/K + 2, D] in the order in which a rank has those of its key heads."""
    size, slots = config.head_size, config.num_attention_heads // config.kv_heads + 2

    def row(head: int, slot: int, element: int) -> int:
        return (head * slots + slot) * size + element

    if version == 0:
        return [row(head, slot, i) for slot in range(slots) for head in heads for i in range(size)]
    if version == 1:
        return [row(head, slot, i) for head in heads for i in range(size) for slot in range(slots)]
    return [row(head, slot, i) for head in heads for slot in range(slots) for i in range(size)]


def chunk_of(
    model: nn.Module, layers: list[int], rank: int, ranks: int, *, first: bool, last: bool, version: int
) -> dict[str, Tensor]:
    """What one tensor parallel rank has of some layers, under Megatron-Core's names."""
    ours, config = model.state_dict(), model.config

    def share(size: int) -> list[int]:
        return list(range(rank * size // ranks, (rank + 1) * size // ranks))

    state = {}
    if first:
        state["embedding.word_embeddings.weight"] = ours["token_embedding.weight"][share(config.vocab_size)]
        if "position_embedding.weight" in ours:
            state["embedding.position_embeddings.weight"] = ours["position_embedding.weight"]
    for own, layer in enumerate(layers):
        theirs = f"decoder.layers.{own}."
        heads = range(rank * config.kv_heads // ranks, (rank + 1) * config.kv_heads // ranks)
        rows, inner = joint_rows(config, heads, version), share(config.inner_size)
        widths = share(config.num_attention_heads * config.head_size)
        for name, value in ours.items():
            if not name.startswith(f"layers.{layer}."):
                continue
            part, _, kind = name.removeprefix(f"layers.{layer}.").rpartition(".")
            if part in ("attention_norm", "feed_forward_norm"):
                state[f"{theirs}{'input' if part == 'attention_norm' else 'pre_mlp'}_layernorm.{kind}"] = value
            elif part in ("attention.query_norm", "attention.key_norm"):
                state[f"{theirs}self_attention.{part[10]}_layernorm.{kind}"] = value
            elif part == "attention.qkv":
                state[f"{theirs}self_attention.linear_qkv.{kind}"] = value[rows]
            elif part == "attention.output":
                state[f"{theirs}self_attention.linear_proj.{kind}"] = value[:, widths] if kind == "weight" else value
            elif part == "feed_forward.output":
                state[f"{theirs}mlp.linear_fc2.{kind}"] = value[:, inner] if kind == "weight" else value
            elif part == "feed_forward.inner":
                gate = ours.get(f"layers.{layer}.feed_forward.gate.{kind}")
                both = [value[inner]] if gate is None else [gate[inner], value[inner]]
                state[f"{theirs}mlp.linear_fc1.{kind}"] = torch.cat(both)
            else:
                assert part == "feed_forward.gate", name
    if last:
        for kind in ("weight", "bias"):
            if f"final_norm.{kind}" in ours:
                state[f"decoder.final_layernorm.{kind}"] = ours[f"final_norm.{kind}"]
        if "head.weight" in ours or not first:
            output = ours.get("head.weight", ours["token_embedding.weight"])
            state["output_layer.weight"] = output[share(config.vocab_size)]
    return {name: value.clone() for name, value in state.items()}


def in_core(state: dict[str, Tensor], is_tied: bool) -> dict[str, Any]:
    return state | {"decoder.layers.0.self_attention._extra_state": io.BytesIO(b"scales")}


def in_core_with_engine(state: dict[str, Tensor], is_tied: bool) -> dict[str, Any]:
    return _layers_renamed(state, ENGINE) | {"decoder.layers.0.mlp.linear_fc1._extra_state": None}


def in_legacy(state: dict[str, Tensor], is_tied: bool) -> dict[str, Any]:
    return _nested(_layers_renamed(state, LEGACY), "encoder", "final_norm", is_tied)


def in_legacy_with_engine(state: dict[str, Tensor], is_tied: bool) -> dict[str, Any]:
    return _nested(_layers_renamed(state, LEGACY_ENGINE), "encoder", "final_norm", is_tied)


def in_first(state: dict[str, Tensor], is_tied: bool) -> dict[str, Any]:
    """As in 2019 and 2020."""
    return _nested(_layers_renamed(state, FIRST), "transformer", "final_layernorm", is_tied)


def _layers_renamed(state: dict[str, Tensor], names: dict[str, str]) -> dict[str, Any]:
    """With other names of the layers' parts; some of Transformer Engine have no module of their own."""
    renamed = {}
    for name, value in state.items():
        if name.startswith("decoder.layers."):
            number, _, rest = name.removeprefix("decoder.layers.").partition(".")
            part, _, kind = rest.rpartition(".")
            part = names.get(part, part)
            is_own = not part.endswith("layer_norm") and not part.startswith("layernorm_mlp")
            renamed[f"decoder.layers.{number}.{part}{'.' if is_own else '_'}{kind}"] = value
        else:
            renamed[name] = value
    return renamed


def _nested(state: dict[str, Tensor], stack: str, norm: str, is_tied: bool) -> dict[str, Any]:
    embedding, layers, rest = {}, {}, {}
    for name, value in state.items():
        if name.startswith("embedding."):
            embedding[name.split(".")[1]] = {"weight": value}
        elif name.startswith("decoder."):
            layers[name.removeprefix("decoder.").replace("final_layernorm", norm)] = value
        else:
            rest["output_layer"] = {"weight": value}
    language_model = {stack: layers} | ({"embedding": embedding} if embedding else {})
    if is_tied:
        copies = {"word_embeddings_for_head": rest["output_layer"]} if rest else {}
        return {"language_model": language_model} | copies
    return {"language_model": language_model | rest}


def write(
    folder: Path,
    model: nn.Module,
    *,
    ranks: int = 1,
    stages: int = 1,
    chunks: int = 1,
    names: Any = in_core,
    version: float | None = 3.0,
    file: str = "model_optim_rng.pt",
    old_zip: bool = False,
    **changes: Any,
) -> Path:
    """A checkpoint of iteration 100. `version` 0 is written as in 2019, without one and without options."""
    config: Any = model.config
    per_chunk = config.num_layers // (stages * chunks)
    place = folder / "iter_0000100"
    for rank in range(ranks):
        for stage in range(stages):
            content: dict[str, Any] = {"iteration": 100}
            if version:
                content["checkpoint_version"] = version
            for chunk in range(chunks):
                start = (chunk * stages + stage) * per_chunk
                state = chunk_of(
                    model, list(range(start, start + per_chunk)), rank, ranks, version=int(version or 0),
                    first=start == 0, last=start + per_chunk == config.num_layers,
                )  # fmt: skip
                content["model" if chunks == 1 else f"model{chunk}"] = names(state, config.tie_embeddings)
            weights = [value for key in content if key.startswith("model") for value in _tensors(content[key])]
            content["optimizer"] = {"state": {0: {"exp_avg": weights[0].clone()}}, "param_groups": [{"lr": 0.1}]}
            content["rng_state"] = [{"torch_rng_state": torch.get_rng_state()}]
            with megatrons_classes() as enumeration:
                if version:
                    content["args"] = arguments(model, ranks, stages, model_type=enumeration.decoder, **changes)
                part = place / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
                part.mkdir(parents=True)
                torch.save(content, part / file, _use_new_zipfile_serialization=not old_zip)
    (folder / "latest_checkpointed_iteration.txt").write_text("100")
    return folder


def _tensors(tree: dict[str, Any]) -> Iterator[Tensor]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value


@contextmanager
def megatrons_classes() -> Iterator[Any]:
    """An enumeration of a module that is there as long as files are written, and not when they are read."""
    made = {name: ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.enums")}
    enumeration = Enum("ModelType", ["encoder", "decoder"], module="megatron.core.enums")
    made["megatron.core.enums"].ModelType = enumeration  # type: ignore[attr-defined]
    modules.update(made)
    try:
        yield enumeration
    finally:
        for name in made:
            del modules[name]
