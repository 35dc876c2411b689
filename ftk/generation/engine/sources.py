"""What the rows of a decoder keep of the sources that an encoder read: keys and values of each decoder layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftk.generation.engine.reading import to_device
from ftk.generation.engine.recorded import num_slots
from ftk.modules.attention import Attend, CrossAttend, Encoded, Memory
from ftk.modules.kv_cache import KeyValueCache, new_caches, packed_index
from ftk.modules.masked_attention import MaskedAttention, fused_attention, step_attention

MAX_TOKENS = 8192
"""Tokens, padding counted, that go through the encoder at once; a longer source goes alone."""


class Sources:
    """The sources of a decoder's rows. Each is encoded once; all hypotheses of a row look at one copy of its keys.

    Memory in bytes, for values of b bytes: 2 b L H rows capacity.

    Args:
        model: an encoder-decoder: has `encode`, `around_cross`, and layers that take a `CrossAttend`.
        capacity: most tokens of a source.

    Raises:
        UserError: the keys and values do not fit into the device's memory.
    """

    def __init__(self, model: Any, num_rows: int, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.device: torch.device = next(model.parameters()).device
        self._mask: Tensor | None = None  # [rows, 1, 1, capacity], of steps that are recorded
        self.lengths = np.ones(num_rows, dtype=np.int64)  # 1 in rows that were never entered: they must see something
        dtype = next(parameter.dtype for parameter in model.parameters() if parameter.is_floating_point())
        self.caches = new_caches(
            [
                torch.empty(module.memory_shape, dtype=dtype, device=self.device)
                for module in model.layers.modules()
                if hasattr(module, "memory_shape")
            ],
            num_rows,
            capacity,
            f"keys and values of {num_rows} sources with up to {capacity} tokens each take {{size}} GB, more than "
            f"{self.device} has; lower batch_size, or shorten the sources",
        )

    def read(
        self, rows: np.ndarray, sources: Sequence[Sequence[int]], spans: Sequence[slice]
    ) -> list[Callable[[Attend], Any]]:
        """Encodes the sources of some rows.

        Args:
            rows: of the decoder, n different ones.
            sources: n, token ids.
            spans: columns of what the decoder reads that belong to each.

        Returns:
            for each layer what makes its attention while this is read.
        """
        lengths = np.array([len(source) for source in sources], dtype=np.int64)
        order, parts = [], []
        for batch in _batches(lengths):
            states, _ = _encoded(self.model, [sources[number] for number in batch], self.device)  # [B, S, H]
            kept = np.concatenate([line * states.size(1) + np.arange(n) for line, n in enumerate(lengths[batch])])
            parts.append(states.flatten(0, 1)[to_device(kept, self.device)])
            order += list(batch)
        states = torch.cat(parts)[None]  # [1, S, H], the sources one behind the other in this order
        own = lengths[order]
        slots = np.concatenate([np.arange(length) for length in own])
        members = np.repeat(rows[order], own)
        places = to_device(members, self.device), to_device(slots, self.device)
        index = packed_index(*places, self.caches[0].num_heads, self.capacity)
        self.lengths[rows] = lengths
        each = [_Span(*span) for span in zip(rows.tolist(), spans, lengths.tolist(), strict=True)]
        return [
            partial(_beside, self.model, _PackedCross(cache, each), _NewMemory(cache, states, index))
            for cache in self.caches
        ]

    def step(
        self, num_rows: int, live: np.ndarray, *, in_place: bool = False
    ) -> tuple[list[Callable[[Attend], Any]], int]:
        """What the steps of the first rows look at, until rows come or go.

        Args:
            num_rows: R.
            live: [R], 1 in rows that write an answer.
            in_place: whether the mask lies where it lay, and S is one of few sizes, for steps that are recorded.

        Returns:
            for each layer what makes its attention, and S.
        """
        lengths = self.lengths[:num_rows]
        length = int((lengths * live).max(initial=1))
        if in_place:
            length = min(num_slots(length), self.capacity)
        mask: Tensor | None = None
        if in_place or (lengths < length).any():
            unseen = to_device(np.arange(length) >= lengths[:, None], self.device)  # [R, S]
            zeros = torch.zeros(unseen.shape, dtype=self.caches[0].dtype, device=self.device)
            mask = zeros.masked_fill_(unseen, float("-inf"))[:, None, None]  # [R, 1, 1, S]
        if in_place and mask is not None:
            if self._mask is None:
                self._mask = mask.new_zeros(len(self.lengths), 1, 1, -(-self.capacity // 8) * 8)
            mask = self._mask[:num_rows, ..., :length].copy_(mask)
        crosses: list[Callable[[Attend], Any]] = [
            partial(_beside, self.model, _StepCross(mask), _KeptMemory(*cache.read(num_rows, length)))
            for cache in self.caches
        ]
        return crosses, length

    def move(self, source: int, target: int) -> None:
        """Row `target` has what row `source` has."""
        for cache in self.caches:
            cache.copy([(source, target, int(self.lengths[source]))])
        self.lengths[target] = self.lengths[source]


def beside_sources(model: Any, own: Attend, sources: Sequence[Sequence[int]], device: torch.device) -> CrossAttend:
    """The attention of whole sequences, with that to their sources, which are encoded here.

    Args:
        model: as of `Sources`.
        own: of the decoder's tokens to each other.
        sources: of each row, token ids.
    """
    states, lengths = _encoded(model, sources, device)
    mask = None
    if lengths is not None:
        mask = (torch.arange(states.size(1), device=device) < lengths[:, None])[:, None, None]  # [B, 1, 1, S]
    return CrossAttend(own, model.around_cross(MaskedAttention(mask)), Encoded(states))


def _encoded(model: Any, sources: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """States of the encoder [B, S, H], and the lengths of the sources, int64 [B]; None where they are alike."""
    lengths = np.array([len(source) for source in sources], dtype=np.int64)
    tokens = np.zeros((len(sources), int(lengths.max())), np.int64)
    for line, source in enumerate(sources):
        tokens[line, : len(source)] = source
    known = to_device(lengths, device) if (lengths < tokens.shape[1]).any() else None
    return model.encode(to_device(tokens, device), known), known


def _beside(model: Any, cross: Attend, memory: Memory, own: Attend) -> CrossAttend:
    """The attention to the source next to that of the decoder itself."""
    return CrossAttend(own, model.around_cross(cross), memory)


class _NewMemory(NamedTuple):
    """Encoded sources, one behind the other, of which a layer makes keys and values, once."""

    cache: KeyValueCache
    states: Tensor  # [1, S, H]
    goes_to: Tensor  # int64 [A S], see `KeyValueCache.write`

    def read(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        key, value = project(self.states)  # [1, A, S, D] each
        self.cache.write(key, value, self.goes_to)
        return key, value


class _KeptMemory(NamedTuple):
    """Keys and values that were made before, [R, A, S, D] each."""

    key: Tensor
    value: Tensor

    def read(self, project: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return self.key, self.value


class _Span(NamedTuple):
    """A frame among packed ones."""

    row: int
    columns: slice
    length: int  # of its source


class _PackedCross(NamedTuple):
    """`attend` for packed frames, each to the source of its row."""

    cache: KeyValueCache
    spans: list[_Span]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query [1, A, T, D] -> [1, A, T, D]; keys and values are read where `_NewMemory` has put them."""
        assert bias is None, "there is no distance between two texts"
        attended = [
            fused_attention(query[:, :, columns], *self.cache.row(row, length), None, scale=scale)
            for row, columns, length in self.spans
        ]
        return torch.cat(attended, dim=2)


class _StepCross(NamedTuple):
    """`attend` for one token of each hypothesis, to the source of its row."""

    mask: Tensor | None  # [R, 1, 1, S], added to the scores; None where all is seen

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query [R, A, W, D], key, value [R, K, S, D] -> [R, A, W, D]"""
        return step_attention(query, key, value, self.mask, bias=bias, scale=scale)


def _batches(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Numbers of the sources that are encoded at once: of like lengths, the longest first."""
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        count = max(1, MAX_TOKENS // max(int(lengths[order[0]]), 1))
        yield order[:count]
        order = order[count:]
