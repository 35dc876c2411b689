"""GLM's parameter names and layouts: ours, the original's (THUDM/GLM), and Hugging Face's.

State dicts go in and come out; files are the checkpoint room's. The original lays the rows of its joint
projection out as [query | key | value], we as [heads, 3, head_size].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.models.glm.config import GLMConfig

StateDict = Mapping[str, Tensor]

HUGGINGFACE_PREFIX = "glm."

# original -> ours
_OUTER_NAMES = {
    "word_embeddings": "token_embedding",
    "transformer.position_embeddings": "position_embedding.position",
    "transformer.block_position_embeddings": "position_embedding.block",
    "transformer.final_layernorm": "final_norm",
}
_LAYER_NAMES = {
    "input_layernorm": "attention_norm",
    "attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_norm",
    "mlp.dense_h_to_4h": "feed_forward.inner",
    "mlp.dense_4h_to_h": "feed_forward.output",
}

# How the original cuts a parameter into model-parallel parts; what is not named here is whole in each part.
_CUT_IN_THIRDS = re.compile(r"\.query_key_value\.(weight|bias)$")  # each of query, key and value on its rows
_CUT_BY_ROWS = re.compile(r"(^word_embeddings\.weight|\.dense_h_to_4h\.(weight|bias))$")
_CUT_BY_COLUMNS = re.compile(r"(\.attention\.dense\.weight|\.dense_4h_to_h\.weight)$")

_ROWS = {"word_embeddings": "rows of the vocabulary", "dense_h_to_4h": "inner values of the feed-forward"}


def from_original(state_dict: StateDict, num_heads: int) -> dict[str, Tensor]:
    """Our state dict of a whole original one (see `merge_parts`).

    Args:
        state_dict: the original's "module" entry.
        num_heads: attention heads; the original does not store their number.

    Raises:
        UserError: a parameter that ftk's GLM does not have, or heads that do not divide the hidden size.
    """
    ours: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        new_name = _translate(name, _OUTER_NAMES, _LAYER_NAMES, "transformer.layers", "layers")
        ours[new_name] = _rows_per_head(value, num_heads) if ".qkv." in new_name else value
    return ours


def to_original(state_dict: StateDict, num_heads: int) -> dict[str, Tensor]:
    """The inverse of `from_original`: the original's names and layouts."""
    outer = {new: old for old, new in _OUTER_NAMES.items()}
    inner = {new: old for old, new in _LAYER_NAMES.items()}
    original: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        new_name = _translate(name, outer, inner, "layers", "transformer.layers")
        original[new_name] = _rows_per_kind(value, num_heads) if ".query_key_value." in new_name else value
    return original


def from_huggingface(state_dict: StateDict, num_heads: int) -> dict[str, Tensor]:
    """Our state dict of one from `GLMForConditionalGeneration` (THUDM/glm-large and its like).

    Args and raises: as `from_original`. Names differ from the original's by the prefix "glm." alone.
    """
    return from_original(
        {name.removeprefix(HUGGINGFACE_PREFIX): value for name, value in state_dict.items()}, num_heads
    )


def to_huggingface(state_dict: StateDict, num_heads: int) -> dict[str, Tensor]:
    """The inverse of `from_huggingface`."""
    return {HUGGINGFACE_PREFIX + name: value for name, value in to_original(state_dict, num_heads).items()}


def merge_parts(parts: Sequence[StateDict]) -> dict[str, Tensor]:
    """One original state dict of its model-parallel parts mp_rank_00, mp_rank_01, ...

    Args:
        parts: in the order of their ranks.

    Raises:
        UserError: the parts do not hold the same parameters.
    """
    assert parts, "no parts to merge"
    for rank, part in enumerate(parts):
        different = sorted(part.keys() ^ parts[0].keys())
        if different:
            raise UserError(
                f"mp_rank_{rank:02d} and mp_rank_00 do not belong together: only one of them holds {different[0]!r}"
            )
    return {name: _merge(name, [part[name] for part in parts]) for name in parts[0]}


def split_parts(state_dict: StateDict, num_parts: int) -> list[dict[str, Tensor]]:
    """The inverse of `merge_parts`; parts hold copies, not views.

    Raises:
        UserError: `num_parts` does not divide a size that must be cut (`check_num_parts` says more, and before).
    """
    pieces = {name: _split(name, value, num_parts) for name, value in state_dict.items()}
    return [{name: piece[rank].clone() for name, piece in pieces.items()} for rank in range(num_parts)]


def check_num_parts(state_dict: StateDict, num_heads: int, num_parts: int) -> None:
    """Refuse a number of model-parallel parts by which the original cannot cut a whole state dict.

    Rows and columns alone do not tell: half a head is no head.

    Raises:
        UserError: `num_parts` does not divide heads, vocabulary or a feed-forward's inner size.
    """
    rows = {
        _ROWS[name.split(".")[-2]]: value.size(0) for name, value in state_dict.items() if _CUT_BY_ROWS.search(name)
    }
    sizes = {"attention heads": num_heads, **rows}
    if num_parts >= 1 and all(size % num_parts == 0 for size in sizes.values()):
        return
    wrong = [f"{size} {what}" for what, size in sizes.items() if num_parts < 1 or size % num_parts]
    common = math.gcd(*sizes.values())
    *others, largest = [str(number) for number in range(1, common + 1) if common % number == 0]
    would = f"{', '.join(others)} or {largest} would" if others else f"{largest} alone would"
    raise UserError(f"--model-parallel-size {num_parts} does not divide {' nor '.join(wrong)} ({would})")


def in_original_order(state_dict: StateDict) -> dict[str, Tensor]:
    """An original state dict in the order of the original's modules, by which its optimizer numbers the parameters."""
    outer, inner = list(_OUTER_NAMES), list(_LAYER_NAMES)

    def place(name: str) -> tuple[int, int, int, bool]:
        module, _, kind = name.rpartition(".")
        if match := re.fullmatch(r"transformer\.layers\.(\d+)\.(.+)", module):
            return 1, int(match[1]), inner.index(match[2]), kind == "bias"
        return 2 * (module == "transformer.final_layernorm"), 0, outer.index(module), kind == "bias"

    return {name: state_dict[name] for name in sorted(state_dict, key=place)}


def config_from_original(state_dict: StateDict, num_heads: int) -> GLMConfig:
    """The shape of a whole original state dict; dropouts keep their defaults.

    Args:
        state_dict: the original's "module" entry, or the one of Hugging Face.
        num_heads: attention heads.

    Raises:
        UserError: a parameter that tells the shape is missing, or the heads do not fit.
    """
    shapes = {name.removeprefix(HUGGINGFACE_PREFIX): value.shape for name, value in state_dict.items()}
    layers = {int(match[1]) for match in map(re.compile(r"transformer\.layers\.([0-9]{1,9})\.").match, shapes) if match}
    needed = [
        "word_embeddings.weight",
        "transformer.position_embeddings.weight",
        "transformer.layers.0.mlp.dense_h_to_4h.weight",
    ]
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise UserError(f"not a GLM state dict: there is no {missing[0]!r}; found {_some(shapes)}")
    vocab_size, hidden_size = shapes["word_embeddings.weight"]
    inner_size = shapes["transformer.layers.0.mlp.dense_h_to_4h.weight"][0]
    block_positions = "transformer.block_position_embeddings.weight" in shapes
    config = GLMConfig(
        vocab_size=vocab_size,
        num_layers=max(layers) + 1,
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        max_positions=shapes["transformer.position_embeddings.weight"][0] - int(block_positions),
        ffn_hidden_size=None if inner_size == 4 * hidden_size else inner_size,
        block_positions=block_positions,
    )
    errors = list(config.validate())
    if errors:
        raise UserError("; ".join(errors))
    return config


def _translate(name: str, outer: Mapping[str, str], inner: Mapping[str, str], layers_from: str, layers_to: str) -> str:
    stem, _, kind = name.rpartition(".")
    layer = re.fullmatch(rf"{re.escape(layers_from)}\.(\d+)\.(.+)", stem)
    if layer and layer[2] in inner:
        return f"{layers_to}.{layer[1]}.{inner[layer[2]]}.{kind}"
    if stem in outer:
        return f"{outer[stem]}.{kind}"
    raise UserError(f"parameter {name!r} has no place in GLM; known are {_some([*outer, *inner])}")


def _rows_per_head(value: Tensor, num_heads: int) -> Tensor:
    """[q | k | v] rows -> [heads, 3, head_size] rows, for a weight [3 H, H] or a bias [3 H]."""
    _check_heads(value, num_heads)
    return value.unflatten(0, (3, num_heads, -1)).transpose(0, 1).flatten(0, 2)


def _rows_per_kind(value: Tensor, num_heads: int) -> Tensor:
    """[heads, 3, head_size] rows -> [q | k | v] rows."""
    _check_heads(value, num_heads)
    return value.unflatten(0, (num_heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def _check_heads(value: Tensor, num_heads: int) -> None:
    if num_heads < 1 or value.size(0) % (3 * num_heads):
        raise UserError(
            f"{num_heads} attention heads do not divide the hidden size {value.size(0) // 3}; "
            "give the right number with --num-attention-heads or --arch"
        )


def _merge(name: str, pieces: list[Tensor]) -> Tensor:
    if _CUT_IN_THIRDS.search(name):
        return torch.cat([torch.cat(kind) for kind in zip(*(piece.chunk(3) for piece in pieces), strict=True)])
    if _CUT_BY_ROWS.search(name):
        return torch.cat(pieces)
    if _CUT_BY_COLUMNS.search(name):
        return torch.cat(pieces, dim=1)
    return pieces[0]


def _split(name: str, value: Tensor, num_parts: int) -> list[Tensor]:
    if _CUT_IN_THIRDS.search(name):
        kinds = [_cut(name, kind, num_parts, 0) for kind in value.chunk(3)]
        return [torch.cat(pieces) for pieces in zip(*kinds, strict=True)]
    if _CUT_BY_ROWS.search(name):
        return _cut(name, value, num_parts, 0)
    if _CUT_BY_COLUMNS.search(name):
        return _cut(name, value, num_parts, 1)
    return [value] * num_parts


def _cut(name: str, value: Tensor, num_parts: int, dim: int) -> list[Tensor]:
    if num_parts < 1 or value.size(dim) % num_parts:
        raise UserError(f"{num_parts} model-parallel parts do not divide {name!r}, size {value.size(dim)}")
    return list(value.chunk(num_parts, dim))


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:6]) or "nothing"
