"""How a decoder reads chunks of tokens: padded to the longest of them, or packed one behind the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftk.generation.blanks import Chunk
from ftk.generation.device import sent
from ftk.modules.attention import fused_attention
from ftk.modules.kv_cache import KeyValueCache, Places
from ftk.modules.masks import Visibility

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
    keys = torch.arange(int((starts + lengths).max()), device=device)  # [S]
    mask = Visibility(prefix=_to(device, context_lengths)).boolean(_to(device, slots), keys)  # [n, 1, T, S]
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
    contexts = _to(device, context_lengths)[:, None]  # [n, 1]
    for number, (row, start, length, end) in enumerate(zip(rows, starts, lengths, ends, strict=True)):
        keys = torch.arange(int(start + length), device=device)  # [S]
        mask = Visibility(prefix=contexts[number]).boolean(keys[int(start) :], keys)  # [1, 1, length, S]
        spans.append(_Span(int(row), slice(int(end - length), int(end)), mask))
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

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query, key, value [n, A, T, D] -> [n, A, T, D]"""
        self.cache.write(key, value, self.places)
        if self.rows is not None:
            key, value = self.cache.gather(self.rows, self.mask.size(-1))  # [n, A, S, D]
        return fused_attention(query, key, value, self.mask, bias=bias, scale=scale)


class _Span(NamedTuple):
    """A chunk among packed ones."""

    row: int  # of the cache
    columns: slice
    mask: Tensor  # bool [1, 1, t, S], t its length and S that of its row: what each token sees


class _PackedAttention(NamedTuple):
    """`attend` for packed chunks: writes them behind what their rows hold, then each by itself looks at its row."""

    cache: KeyValueCache
    places: Places
    spans: list[_Span]

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query, key, value [1, A, T, D] -> [1, A, T, D]"""
        assert bias is None, "each chunk has keys of its own; a model with a bias reads them padded"
        self.cache.write(key, value, self.places)
        attended = []
        for row, columns, mask in self.spans:
            keys, values = self.cache.row(row, mask.size(-1))  # [1, A, S, D]
            attended.append(fused_attention(query[:, :, columns], keys, values, mask, scale=scale))
        return torch.cat(attended, dim=2)


def _lengths(chunks: Sequence[Chunk]) -> Numbers:
    return np.array([len(chunk.tokens) for chunk in chunks], dtype=np.int64)


def _to(device: torch.device, array: np.ndarray) -> Tensor:
    return sent(torch.from_numpy(np.ascontiguousarray(array)), device)
