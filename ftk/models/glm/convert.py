"""GLM's parameter names and layouts: ours and the original's (THUDM/GLM), and its model-parallel parts; GLM-130B's.

State dicts go in and come out; files are `original`'s. The original lays the rows of its joint projection out as
[query | key | value], we and GLM-130B as [heads, 3, head_size].
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.models.conversion import JointHeads, LazyTensors, Rename, renamed, weight_and_bias
from ftk.models.glm import GLMConfig
from ftk.models.glm130b import GLM130B_POSITIONS, GLM130BConfig
from ftk.models.glm130b.convert import GLM130B_EMBEDDING, GLM130B_RENAMES

StateDict = Mapping[str, Tensor]

_LAYER_NAME = re.compile(r"transformer\.layers\.([0-9]{1,9})\.")
_ROWS_PER_HEAD = JointHeads()
_LAYER = "transformer.layers.*."

# In the order of the original's modules, by which its optimizer numbers the parameters.
RENAMES: tuple[Rename, ...] = (
    Rename(("token_embedding.weight",), ("word_embeddings.weight",)),
    Rename(("position_embedding.position.weight",), ("transformer.position_embeddings.weight",)),
    Rename(("position_embedding.block.weight",), ("transformer.block_position_embeddings.weight",)),
    *weight_and_bias("layers.*.attention_norm", f"{_LAYER}input_layernorm"),
    *weight_and_bias("layers.*.attention.qkv", f"{_LAYER}attention.query_key_value", _ROWS_PER_HEAD, _ROWS_PER_HEAD),
    *weight_and_bias("layers.*.attention.output", f"{_LAYER}attention.dense"),
    *weight_and_bias("layers.*.feed_forward_norm", f"{_LAYER}post_attention_layernorm"),
    *weight_and_bias("layers.*.feed_forward.inner", f"{_LAYER}mlp.dense_h_to_4h"),
    *weight_and_bias("layers.*.feed_forward.output", f"{_LAYER}mlp.dense_4h_to_h"),
    *weight_and_bias("final_norm", "transformer.final_layernorm"),
)


class _Cut(NamedTuple):
    """How a parameter is cut into model-parallel parts; what no cut names is whole in each part.

    Attributes:
        names: pattern of the parameters.
        dim: that is cut.
        pieces: blocks along it that are cut each by itself.
        what: is counted by a block's size, for messages.
    """

    names: re.Pattern[str]
    dim: int
    pieces: int
    what: str = ""


_EMBEDDING = re.compile(r"word_embeddings\.weight$")
_JOINT = re.compile(r"\.query_key_value\.(weight|bias)$")
_INNER = re.compile(r"\.dense_h_to_4h\.(weight|bias)$")
_COLUMNS = _Cut(re.compile(r"(\.attention\.dense\.weight|\.dense_4h_to_h\.weight)$"), 1, 1)
_ROWS = _Cut(_EMBEDDING, 0, 1, "rows of the vocabulary")
_GLM_CUTS = (_ROWS, _Cut(_JOINT, 0, 3), _Cut(_INNER, 0, 1, "inner values of the feed-forward"), _COLUMNS)
_GLM130B_CUTS = (_ROWS, _Cut(_JOINT, 0, 1), _Cut(_INNER, 0, 2, "inner values of the feed-forward"), _COLUMNS)


def from_original(state_dict: StateDict, config: GLMConfig | GLM130BConfig) -> dict[str, Tensor]:
    """Our state dict of a whole original one (see `merge_parts`).

    Args:
        state_dict: the original's "module" entry.
        config: for the number of attention heads.

    Raises:
        UserError: a parameter that ftk's GLM does not have, or heads that do not divide the hidden size.
    """
    known = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    return renamed(LazyTensors.of(known), _renames(config), config).all()


def to_original(state_dict: StateDict, config: GLMConfig | GLM130BConfig) -> dict[str, Tensor]:
    """The inverse of `from_original`: the original's names and layouts."""
    return renamed(LazyTensors.of(state_dict), _renames(config), config, back=True).all()


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
    cuts = _cuts(parts[0])
    return {name: _merge(cuts.get(name), [part[name] for part in parts]) for name in parts[0]}


def split_parts(state_dict: StateDict, num_parts: int) -> list[dict[str, Tensor]]:
    """The inverse of `merge_parts`; parts hold copies, not views.

    Raises:
        UserError: `num_parts` does not divide a size that must be cut (`check_num_parts` says more, and before).
    """
    cuts = _cuts(state_dict)
    pieces = {name: _split(name, cuts.get(name), value, num_parts) for name, value in state_dict.items()}
    return [{name: piece[rank].clone() for name, piece in pieces.items()} for rank in range(num_parts)]


def check_num_parts(state_dict: StateDict, num_heads: int, num_parts: int) -> None:
    """Refuse a number of model-parallel parts by which the original cannot cut a whole state dict.

    Rows and columns alone do not tell: half a head is no head.

    Raises:
        UserError: `num_parts` does not divide heads, vocabulary or a feed-forward's inner size.
    """
    rows = {cut.what: state_dict[name].size(0) // cut.pieces for name, cut in _cuts(state_dict).items() if cut.what}
    sizes = {"attention heads": num_heads, **rows}
    if num_parts >= 1 and all(size % num_parts == 0 for size in sizes.values()):
        return
    wrong = [f"{size} {what}" for what, size in sizes.items() if num_parts < 1 or size % num_parts]
    common = math.gcd(*sizes.values())
    *others, largest = [str(number) for number in range(1, common + 1) if common % number == 0]
    would = f"{', '.join(others)} or {largest} would" if others else f"{largest} alone would"
    raise UserError(f"`model_parallel_size` {num_parts} does not divide {' nor '.join(wrong)} ({would})")


def in_original_order(state_dict: StateDict) -> dict[str, Tensor]:
    """An original state dict in the order of the original's modules, by which its optimizer numbers the parameters.

    Those of GLM-130B are as they are: it was published without an optimizer.
    """
    if GLM130B_EMBEDDING in state_dict:
        return dict(state_dict)
    order = [rename.theirs[0] for rename in RENAMES]
    first, last = (order.index(f"{_LAYER}{name}") for name in ("input_layernorm.weight", "mlp.dense_4h_to_h.bias"))

    def place(name: str) -> tuple[int, int, int]:
        layer = _LAYER_NAME.match(name)
        at = order.index(_LAYER + name[layer.end() :] if layer else name)
        return (at > last) + (at >= first), int(layer[1]) if layer else 0, at

    return {name: state_dict[name] for name in sorted(state_dict, key=place)}


def config_from_original(state_dict: StateDict, num_heads: int) -> GLMConfig | GLM130BConfig:
    """The shape of a whole original state dict; dropouts keep their defaults, and so do the positions of GLM-130B.

    Args:
        state_dict: the original's "module" entry.
        num_heads: attention heads.

    Raises:
        UserError: a parameter that tells the shape is missing, or the heads do not fit.
    """
    shapes = {name: value.shape for name, value in state_dict.items()}
    layers = {int(match[1]) for match in map(_LAYER_NAME.match, shapes) if match}
    is_rotary = GLM130B_EMBEDDING in shapes
    embedding = GLM130B_EMBEDDING if is_rotary else "word_embeddings.weight"
    needed = [embedding, "transformer.layers.0.mlp.dense_h_to_4h.weight"]
    needed += [] if is_rotary else ["transformer.position_embeddings.weight"]
    missing = [name for name in needed if name not in shapes]
    if missing:
        raise UserError(f"not a GLM state dict: there is no {missing[0]!r}; found {_some(shapes)}")
    vocab_size, hidden_size = shapes[embedding]
    inner_size = shapes["transformer.layers.0.mlp.dense_h_to_4h.weight"][0] // (2 if is_rotary else 1)
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_layers": max(layers) + 1,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "ffn_hidden_size": None if inner_size == 4 * hidden_size else inner_size,
    }
    config: GLMConfig | GLM130BConfig
    if is_rotary:
        config = GLM130BConfig(**shape, max_positions=2048, **GLM130B_POSITIONS)
    else:
        in_blocks = "transformer.block_position_embeddings.weight" in shapes
        rows = shapes["transformer.position_embeddings.weight"][0]
        config = GLMConfig(**shape, max_positions=rows - int(in_blocks), block_positions=in_blocks)
    errors = list(config.validate())
    if errors:
        raise UserError("; ".join(errors))
    return config


def _renames(config: GLMConfig | GLM130BConfig) -> tuple[Rename, ...]:
    return GLM130B_RENAMES if isinstance(config, GLM130BConfig) else RENAMES


def _cuts(state_dict: StateDict) -> dict[str, _Cut]:
    """Name of a parameter -> how it is cut."""
    cuts = _GLM130B_CUTS if GLM130B_EMBEDDING in state_dict else _GLM_CUTS
    return {name: cut for name in state_dict for cut in cuts if cut.names.search(name)}


def _merge(cut: _Cut | None, parts: list[Tensor]) -> Tensor:
    if cut is None:
        return parts[0]
    blocks = zip(*(part.chunk(cut.pieces, cut.dim) for part in parts), strict=True)
    return torch.cat([piece for block in blocks for piece in block], cut.dim)


def _split(name: str, cut: _Cut | None, value: Tensor, num_parts: int) -> list[Tensor]:
    if cut is None:
        return [value] * num_parts
    blocks = [_cut(name, block, num_parts, cut.dim) for block in value.chunk(cut.pieces, cut.dim)]
    return [torch.cat(pieces, cut.dim) for pieces in zip(*blocks, strict=True)]


def _cut(name: str, value: Tensor, num_parts: int, dim: int) -> list[Tensor]:
    if num_parts < 1 or value.size(dim) % num_parts:
        raise UserError(f"{num_parts} model-parallel parts do not divide {name!r}, size {value.size(dim)}")
    return list(value.chunk(num_parts, dim))


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:6]) or "nothing"
