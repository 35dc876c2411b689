"""Parameters of Megatron-LM: the names of all releases as Megatron-Core's, the parts of ranks put together, and ftk's.

Sources, in NVIDIA/Megatron-LM: tools/checkpoint/loader_base.py (how parameters are cut) and schema_mcore.py (names),
megatron/legacy/model and, in huggingface/transformers, models/megatron_gpt2 (older names).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.models.parts import Cut, cut_of, merge
from ftk.models.renames import HALVES, LazyTensors, Rename, renamed, weight_and_bias

LAYER = re.compile(r"decoder\.layers\.(\d{1,9})\.(.+)")
EMBEDDING, POSITIONS = "embedding.word_embeddings.weight", "embedding.position_embeddings.weight"
_HEAD, _QKV, INNER = "output_layer.weight", "self_attention.linear_qkv", "mlp.linear_fc1"
_OLD_QKV = "self_attention.query_key_value"  # whose rows have another order in old versions
_OTHER_NAMES = {  # in Megatron-Core with layers of its own -> in other releases, and in layers of Transformer Engine
    "self_attention.query_key_value": "attention.query_key_value",
    "self_attention.linear_proj": "attention.dense self_attention.dense self_attention.proj",
    "self_attention.linear_qkv": "self_attention.layernorm_qkv",
    "input_layernorm": "input_norm self_attention.linear_qkv.layer_norm self_attention.layernorm_qkv.layer_norm",
    "pre_mlp_layernorm": "post_attention_norm post_attention_layernorm"
    " mlp.linear_fc1.layer_norm layernorm_mlp.layer_norm",
    "mlp.linear_fc1": "mlp.dense_h_to_4h layernorm_mlp.fc1",
    "mlp.linear_fc2": "mlp.dense_4h_to_h layernorm_mlp.fc2",
}
_LAYER_NAMES = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}
_NO_PARAMETERS = ("_extra_state", "rotary_pos_emb.inv_freq")
_OF_BERT = ("lm_head.", "binary_head.", "pooler.")
_COPIES = ("word_embeddings_for_head.weight", _HEAD)  # of a tied embedding, in the last pipeline stage

_ALL = "decoder.layers.*."
_SHARED = (
    Rename(("token_embedding.weight",), (EMBEDDING,)),
    Rename(("position_embedding.weight",), (POSITIONS,)),
    *weight_and_bias("layers.*.attention_norm", f"{_ALL}input_layernorm"),
    *weight_and_bias("layers.*.attention.qkv", f"{_ALL}{_QKV}"),
    Rename(("layers.*.attention.query_norm.weight",), (f"{_ALL}self_attention.q_layernorm.weight",)),
    Rename(("layers.*.attention.key_norm.weight",), (f"{_ALL}self_attention.k_layernorm.weight",)),
    *weight_and_bias("layers.*.attention.output", f"{_ALL}self_attention.linear_proj"),
    *weight_and_bias("layers.*.feed_forward_norm", f"{_ALL}pre_mlp_layernorm"),
    *weight_and_bias("layers.*.feed_forward.output", f"{_ALL}mlp.linear_fc2"),
    *weight_and_bias("final_norm", "decoder.final_layernorm"),
    Rename(("head.weight",), (_HEAD,)),
)
_GATES = ("layers.*.feed_forward.gate.weight", "layers.*.feed_forward.inner.weight")  # the first half is activated
_RENAMES = {  # by whether feed-forward networks are gated
    False: (*_SHARED, *weight_and_bias("layers.*.feed_forward.inner", f"{_ALL}{INNER}")),
    True: (*_SHARED, Rename(_GATES, (f"{_ALL}{INNER}.weight",), HALVES)),
}


def named(chunk: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a state dict, or of nested ones, under Megatron-Core's names."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in _flat(chunk):
        name = re.sub(r"^(encoder|transformer)\.", "decoder.", name.removeprefix("language_model."))
        name = re.sub(r"^decoder\.final_norm\.", "decoder.final_layernorm.", name)
        if layer := LAYER.fullmatch(name):
            module = re.fullmatch(r"(.+)[._](weight|bias)", layer[2])
            if module and module[1] in _LAYER_NAMES:
                name = f"decoder.layers.{layer[1]}.{_LAYER_NAMES[module[1]]}.{module[2]}"
        if name.startswith(_OF_BERT):
            raise UserError("holds a BERT, whose norms are in other places than those of ftk's; GPT models are read")
        if name in tensors:
            raise UserError(f"holds {name!r} twice, as of an encoder and a decoder; GPT models are read")
        tensors[name] = tensor
    return tensors


def _flat(chunk: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Dotted names and tensors; each mapping is looked into once, as a hostile file may hold itself."""
    pending: list[tuple[str, dict[str, Any]]] = [("", chunk)]
    seen = {id(chunk)}
    while pending:
        prefix, mapping = pending.pop()
        for key, value in mapping.items():
            name = f"{prefix}{key}"
            if name.endswith(_NO_PARAMETERS):
                continue
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, dict) and id(value) not in seen:
                seen.add(id(value))
                pending.append((f"{name}.", value))
            else:
                raise UserError(f"{name!r:.200} is no tensor")


def parameters(stored: dict[str, list[Tensor]], version: float, config: Any, gated: bool) -> LazyTensors:
    """The parameters in ftk's names and layouts; one is put together of its parts when it is read.

    Args:
        stored: Megatron-Core's name -> the part of each tensor parallel rank.
        version: of the order of rows of queries, keys and values.
        config: of the model.
        gated: whether its feed-forward networks are.

    Raises:
        UserError: parts that do not fit, or a parameter without a place in the model.
    """
    older = {name.replace(_OLD_QKV, _QKV): name for name in stored if f".{_OLD_QKV}." in name}
    if twice := older.keys() & stored.keys():
        raise UserError(f"holds {min(twice)!r} under two names")
    stored |= {name: stored.pop(old) for name, old in older.items()}
    if older and version < 2 and config.kv_heads != config.num_attention_heads:
        raise UserError(f"checkpoint_version is {version}, in which there were no grouped key heads")
    heads = config.num_attention_heads // len(stored[EMBEDDING])
    cuts = (
        Cut(re.compile(rf"^({re.escape(EMBEDDING)}|{re.escape(_HEAD)}|{re.escape(_COPIES[0])})$"), 0),
        Cut(re.compile(rf"\.{re.escape(_QKV)}\.(weight|bias)$"), 0),
        Cut(re.compile(rf"\.{re.escape(INNER)}\.(weight|bias)$"), 0, pieces=2 if gated else 1),
        Cut(re.compile(r"\.(self_attention\.linear_proj|mlp\.linear_fc2)\.weight$"), 1),
    )

    def whole(name: str, tensors: Sequence[Tensor]) -> Tensor:
        if name in older:
            tensors = [_by_head(rows, version, heads) for rows in tensors]
        return merge(name, tensors, cuts)

    described = {}
    for name, tensors in stored.items():
        try:
            if cut_of(name, cuts) is None and not _are_alike(tensors):
                raise UserError(
                    f"{name!r} is whole on each rank, but differs between ranks; the files are of different runs"
                )
            described[name] = whole(name, [tensor.to("meta") for tensor in tensors])
        except (IndexError, RuntimeError, ValueError) as error:
            shapes = " and ".join(str(list(tensor.shape)) for tensor in tensors)
            raise UserError(f"the parts of {name!r} do not fit, {shapes}") from error
    theirs = LazyTensors(described, lambda name: whole(name, stored[name]))
    if config.tie_embeddings:
        if differing := [name for name in _COPIES if theirs.differ(name, EMBEDDING)]:
            raise UserError(f"{differing[0]!r} differs from {EMBEDDING!r}, but by its options they are one")
        theirs = theirs.without(_COPIES)
    return renamed(theirs, _RENAMES[gated], config)


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether the parts are of one run, where they may differ by rounding; only vectors are looked at."""
    if tensors[0].dim() != 1:
        return True
    first, *others = (tensor.float() for tensor in tensors)
    return all(torch.allclose(first, other, rtol=1e-2, atol=1e-3) for other in others)


def _by_head(rows: Tensor, version: float, num_heads: int) -> Tensor:
    """Rows of queries, keys and values of one part, [A, 3, D] or by groups [K, A/K + 2, D] from version 2 on.

    Those of `query_key_value` were [3, A, D] in version 0 and [A, D, 3] in version 1; no other name is touched by
    `fix_query_key_value_ordering` there.
    """
    if version >= 2:
        return rows
    if version == 1:
        return rows.unflatten(0, (num_heads, -1, 3)).transpose(1, 2).flatten(0, 2)
    return rows.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)
