"""GLM's parameter names and layouts, ours and the original's (THUDM/GLM), and how the original's files are cut.

State dicts go in and come out; files are `original`'s. Another family whose files have the original's form registers an
`OriginalFamily`. GLM lays the rows of its joint projection out as [query | key | value], we as [heads, 3, head_size].
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftk.config.options import mistakes
from ftk.errors import UserError
from ftk.models.config import TransformerConfig
from ftk.models.glm import ORIGINAL_FAMILIES, GLMConfig, register_original_family
from ftk.models.parts import Cut, check_same_names, cut_of, merge, split
from ftk.models.renames import JointHeads, LazyTensors, Rename, renamed, weight_and_bias

StateDict = Mapping[str, Tensor]

_LAYER_NAME = re.compile(r"transformer\.layers\.([0-9]{1,9})\.")
_INNER_WEIGHT = "mlp.dense_h_to_4h.weight"
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


class OriginalFamily(ABC):
    """How files of the original's form name and cut a family's parameters; registered under the model's name.

    Attributes:
        title: what such files are called in messages.
        config_class: of the model's options.
        embedding: the token embedding, by whose name a state dict of the family is recognised.
        positions: further parameters that tell the shape.
        renames: all parameters.
        joint_pieces: blocks of a joint projection's rows that are cut each by itself.
        inner_matrices: that stand in one `mlp.dense_h_to_4h`.
    """

    title: ClassVar[str]
    config_class: ClassVar[type[TransformerConfig]]
    embedding: ClassVar[str]
    positions: ClassVar[Sequence[str]] = ()
    renames: ClassVar[Sequence[Rename]]
    joint_pieces: ClassVar[int] = 1
    inner_matrices: ClassVar[int] = 1

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """How model-parallel parts share the parameters."""
        inner = "inner values of the feed-forward"
        return (
            Cut(re.compile(r"word_embeddings\.weight$"), 0, what="rows of the vocabulary"),
            Cut(re.compile(r"\.query_key_value\.(weight|bias)$"), 0, self.joint_pieces),
            Cut(re.compile(r"\.dense_h_to_4h\.(weight|bias)$"), 0, self.inner_matrices, inner),
            Cut(re.compile(r"(\.attention\.dense\.weight|\.dense_4h_to_h\.weight)$"), 1),
        )

    @abstractmethod
    def config(self, shapes: Mapping[str, torch.Size], shape: dict[str, Any]) -> TransformerConfig:
        """The model's options.

        Args:
            shapes: of a whole state dict, by name.
            shape: options that all families have.
        """

    @abstractmethod
    def task(self, config: Any) -> dict[str, Any]:
        """The section of config.yaml for `Contents.task`."""

    def in_order(self, state_dict: StateDict) -> dict[str, Tensor]:
        """A whole state dict in the order by which the original's optimizer numbers the parameters."""
        return dict(state_dict)


@register_original_family("glm")
class OriginalGLMFamily(OriginalFamily):
    title = "the original GLM"
    config_class = GLMConfig
    embedding = "word_embeddings.weight"
    positions = ("transformer.position_embeddings.weight",)
    renames = RENAMES
    joint_pieces = 3

    def config(self, shapes: Mapping[str, torch.Size], shape: dict[str, Any]) -> GLMConfig:
        in_blocks = "transformer.block_position_embeddings.weight" in shapes
        rows = shapes[self.positions[0]][0]
        return GLMConfig(**shape, max_positions=rows - int(in_blocks), block_positions=in_blocks)

    def task(self, config: GLMConfig) -> dict[str, Any]:
        return {"_name": "glm_blank", "seq_length": config.max_positions, "block_positions": config.block_positions}

    def in_order(self, state_dict: StateDict) -> dict[str, Tensor]:
        order = [rename.theirs[0] for rename in RENAMES]
        first, last = (order.index(f"{_LAYER}{name}") for name in ("input_layernorm.weight", "mlp.dense_4h_to_h.bias"))

        def place(name: str) -> tuple[int, int, int]:
            layer = _LAYER_NAME.match(name)
            at = order.index(_LAYER + name[layer.end() :] if layer else name)
            return (at > last) + (at >= first), int(layer[1]) if layer else 0, at

        return {name: state_dict[name] for name in sorted(state_dict, key=place)}


def from_original(state_dict: StateDict, config: TransformerConfig) -> dict[str, Tensor]:
    """Our state dict of a whole original one (see `merge_parts`).

    Args:
        state_dict: the original's "module" entry.
        config: for the number of attention heads.

    Raises:
        UserError: a parameter that ftk's model does not have, or heads that do not divide the hidden size.
    """
    known = {name: value for name, value in state_dict.items() if not name.endswith("rotary_emb.inv_freq")}
    return renamed(LazyTensors.of(known), _family_with(config).renames, config).all()


def to_original(state_dict: StateDict, config: TransformerConfig) -> dict[str, Tensor]:
    """The inverse of `from_original`: the original's names, layouts and order."""
    family = _family_with(config)
    return family.in_order(renamed(LazyTensors.of(state_dict), family.renames, config, back=True).all())


def merge_parts(parts: Sequence[StateDict]) -> dict[str, Tensor]:
    """One original state dict of its model-parallel parts mp_rank_00, mp_rank_01, ...

    Args:
        parts: in the order of their ranks.

    Raises:
        UserError: the parts do not hold the same parameters.
    """
    assert parts, "no parts to merge"
    check_same_names({f"mp_rank_{rank:02d}": part for rank, part in enumerate(parts)})
    cuts = family_of(parts[0])[1].cuts
    return {name: merge(name, [part[name] for part in parts], cuts) for name in parts[0]}


def split_parts(state_dict: StateDict, num_parts: int) -> list[dict[str, Tensor]]:
    """The inverse of `merge_parts`; parts hold copies, not views.

    Raises:
        UserError: `num_parts` does not divide a size that must be cut (`check_num_parts` says more, and before).
    """
    cuts = family_of(state_dict)[1].cuts
    pieces = {name: split(name, value, num_parts, cuts) for name, value in state_dict.items()}
    return [{name: piece[rank].clone() for name, piece in pieces.items()} for rank in range(num_parts)]


def check_num_parts(state_dict: StateDict, num_heads: int, num_parts: int) -> None:
    """Refuse a number of model-parallel parts by which the original cannot cut a whole state dict.

    Rows and columns alone do not tell: half a head is no head.

    Raises:
        UserError: `num_parts` does not divide heads, vocabulary or a feed-forward's inner size.
    """
    cuts = family_of(state_dict)[1].cuts
    found = [(cut, state_dict[name].size(0)) for name in state_dict if (cut := cut_of(name, cuts)) and cut.what]
    sizes = {"attention heads": num_heads, **{cut.what: size // cut.pieces for cut, size in found}}
    if num_parts >= 1 and all(size % num_parts == 0 for size in sizes.values()):
        return
    wrong = [f"{size} {what}" for what, size in sizes.items() if num_parts < 1 or size % num_parts]
    common = math.gcd(*sizes.values())
    *others, largest = [str(number) for number in range(1, common + 1) if common % number == 0]
    would = f"{', '.join(others)} or {largest} would" if others else f"{largest} alone would"
    raise UserError(f"`model_parallel_size` {num_parts} does not divide {' nor '.join(wrong)} ({would})")


def config_from_original(state_dict: StateDict, num_heads: int) -> TransformerConfig:
    """The shape of a whole original state dict; what the weights do not show keeps its default.

    Args:
        state_dict: the original's "module" entry.
        num_heads: attention heads.

    Raises:
        UserError: a parameter that tells the shape is missing, or the heads do not fit.
    """
    _, family = family_of(state_dict)
    shapes = {name: value.shape for name, value in state_dict.items()}
    layers = {int(match[1]) for match in map(_LAYER_NAME.match, shapes) if match}
    inner_weight = f"transformer.layers.0.{_INNER_WEIGHT}"
    missing = [name for name in (family.embedding, inner_weight, *family.positions) if name not in shapes]
    if missing:
        raise UserError(
            f"not a GLM state dict: there is no {missing[0]!r}; found {', '.join(list(shapes)[:6]) or 'nothing'}"
        )
    vocab_size, hidden_size = shapes[family.embedding]
    inner_size = shapes[inner_weight][0] // family.inner_matrices
    shape: dict[str, Any] = {
        "vocab_size": vocab_size,
        "num_layers": max(layers) + 1,
        "hidden_size": hidden_size,
        "num_attention_heads": num_heads,
        "ffn_hidden_size": None if inner_size == 4 * hidden_size else inner_size,
    }
    config = family.config(shapes, shape)
    if errors := mistakes(config):
        raise UserError("; ".join(errors))
    return config


def family_of(names: Collection[str]) -> tuple[str, OriginalFamily]:
    """The model and family that original parameters of these names are of; GLM, where no name tells."""
    found = next((name for name in ORIGINAL_FAMILIES if _family(name).embedding in names), "glm")
    return found, _family(found)


def _family_with(config: TransformerConfig) -> OriginalFamily:
    families = map(_family, ORIGINAL_FAMILIES)
    return next(family for family in families if isinstance(config, family.config_class))


def _family(name: str) -> OriginalFamily:
    family: OriginalFamily = ORIGINAL_FAMILIES.get(name).target()
    return family
