"""How a decoder reads chunks of tokens: padded to the longest of them, or packed one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.generation.blanks import Chunk
from ftk.generation.device import sent
from ftk.modules.kv_cache import KeyValueCache, Places

Numbers = npt.NDArray[np.int64]


class Where(NamedTuple):
    """Where n chunks go in a decoder's rows; three of int64 [n].

    Attributes:
        rows: of the decoder, n different ones.
        starts: the slot of each chunk's first token; those before hold what was read earlier.
        context_lengths: the leading slots of each row, which all its tokens see.
    """

    rows: Numbers
    starts: Numbers
    context_lengths: Numbers


class Reading(NamedTuple):
    """Chunks as the model reads them: n padded ones, B = n and T the longest; or packed, B = 1 and T their sum.

    Attributes:
        tokens: int64 [B, T].
        position_ids: int64 [B, 2, T].
        places: where the real tokens are here and in the caches.
        last: line and column of the last token of each chunk, int64 [n] each.
        attend: makes the `attend` of a layer, given its cache.
    """

    tokens: Tensor
    position_ids: Tensor
    places: Places
    last: tuple[Tensor, Tensor]
    attend: Callable[[KeyValueCache], _PaddedAttention | _PackedAttention]


def read_padded(chunks: Sequence[Chunk], where: Where, device: torch.device) -> Reading:
    """Chunks side by side. All are computed as if they were as long as the longest."""
    rows, starts, context_lengths = where
    lengths = _lengths(chunks)
    columns = np.arange(lengths.max())  # [T]
    slots = starts[:, None] + columns  # [n, T]
    members, real = np.nonzero(columns < lengths[:, None])
    places = Places(*(_to(device, part) for part in (rows[members], slots[members, real], members, real)))
    keys = np.arange((starts + lengths).max())  # [S]
    visible = (keys < context_lengths[:, None, None]) | (keys <= slots[:, :, None])  # [n, T, S]
    mask = _to(device, visible)[:, None]
    earlier = _to(device, rows) if starts.any() else None

    def pad(lists: Sequence[Sequence[int]]) -> Numbers:
        """Filled up with zeros, whose results nobody reads: [n, T]"""
        lines = np.zeros(slots.shape, dtype=np.int64)
        lines[members, real] = np.concatenate(lists)
        return lines

    tokens, text, block = (pad(lists) for lists in zip(*chunks, strict=True))
    return Reading(
        _to(device, tokens),
        _to(device, np.stack((text, block), axis=1)),
        places,
        (torch.arange(len(chunks), device=device), _to(device, lengths - 1)),
        lambda cache: _PaddedAttention(cache, places, mask, earlier),
    )


def read_packed(chunks: Sequence[Chunk], where: Where, device: torch.device) -> Reading:
    """Chunks one behind the other: nothing is padding; each is attended to by itself."""
    rows, starts, context_lengths = where
    lengths = _lengths(chunks)
    ends = np.cumsum(lengths)
    members = np.repeat(np.arange(len(chunks)), lengths)  # [T], T the sum of lengths
    columns = np.arange(ends[-1])
    slots = (starts - ends + lengths)[members] + columns
    lines = np.zeros_like(columns)
    places = Places(*(_to(device, part) for part in (rows[members], slots, lines, columns)))
    spans = []
    for row, start, length, end, context in zip(rows, starts, lengths, ends, context_lengths, strict=True):
        keys = np.arange(start + length)  # [S]
        visible = (keys < context) | (keys <= keys[start:, None])  # [length, S]
        spans.append(_Span(int(row), slice(int(end - length), int(end)), _to(device, visible)))
    tokens, text, block = (np.concatenate(lists)[None] for lists in zip(*chunks, strict=True))
    return Reading(
        _to(device, tokens),
        _to(device, np.stack((text, block), axis=1)),
        places,
        (torch.zeros(len(chunks), dtype=torch.int64, device=device), _to(device, ends - 1)),
        lambda cache: _PackedAttention(cache, places, spans),
    )


class _PaddedAttention(NamedTuple):
    """`attend` for padded chunks: writes them behind what their rows hold, then each sees its row through the mask."""

    cache: KeyValueCache
    places: Places
    mask: Tensor  # [n, 1, T, S]
    rows: Tensor | None  # [n]; None where the chunks are all that their rows hold

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [n, A, T, D] -> [n, A, T, D]"""
        self.cache.write(key, value, self.places)
        if self.rows is not None:
            key, value = self.cache.gather(self.rows, self.mask.size(-1))  # [n, A, S, D]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=self.mask)


class _Span(NamedTuple):
    """A chunk among packed ones."""

    row: int  # of the cache
    columns: slice
    mask: Tensor  # bool [t, S], t its length and S that of its row: what each token sees


class _PackedAttention(NamedTuple):
    """`attend` for packed chunks: writes them behind what their rows hold, then each by itself looks at its row."""

    cache: KeyValueCache
    places: Places
    spans: list[_Span]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [1, A, T, D] -> [1, A, T, D]"""
        self.cache.write(key, value, self.places)
        attended = []
        for row, columns, mask in self.spans:
            keys, values = self.cache.row(row, mask.size(-1))  # [1, A, S, D]
            attended.append(F.scaled_dot_product_attention(query[:, :, columns], keys, values, attn_mask=mask))
        return torch.cat(attended, dim=2)


def _lengths(chunks: Sequence[Chunk]) -> Numbers:
    return np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)


def _to(device: torch.device, array: np.ndarray) -> Tensor:
    return sent(torch.from_numpy(np.ascontiguousarray(array)), device)
