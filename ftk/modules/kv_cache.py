"""Keys and values of one attention layer, in buffers made once and written in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ftk.errors import UserError


class Places(NamedTuple):
    """Where the tokens of a chunk go, for who looks at them there: P real tokens, all int64 [P].

    Token `columns[i]` of the chunk's row `members[i]` is written to slot `slots[i]` of the cache's row `rows[i]`.
    Padding has no place, so rows of different lengths lie without holes, each at its own write position.
    """

    rows: Tensor
    slots: Tensor
    members: Tensor
    columns: Tensor


class KeyValueCache:
    """Keys and values of one layer: two buffers [rows, K, capacity, D], made once.

    Heads come before slots, so that what a head reads lies in one piece: on a CPU a step's attention takes two thirds
    of the time that it takes the other way round.

    Args:
        num_rows: sequences that are held.
        capacity: slots of each row.
        like: [K, D], of the type and on the device of the keys; None: the buffers are made at the first write.
    """

    def __init__(self, num_rows: int, capacity: int, like: Tensor | None = None) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None
        if like is not None:
            self._buffers(like[None, :, None])

    def write(self, key: Tensor, value: Tensor, index: Tensor) -> None:
        """Writes tokens, key and value [n, K, T, D], to the places of `packed_index` (n is 1) or `step_index`."""
        size = key.size(-1)
        for buffer, new in zip(self._buffers(key), (key, value), strict=True):
            buffer.view(-1, size).index_copy_(0, index, new.reshape(-1, size))

    def packed(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of S tokens, [S, K, D] each, by their `packed_index`."""
        keys, values = (
            buffer.view(-1, buffer.size(-1))[index].unflatten(0, (buffer.size(1), -1)).transpose(0, 1)
            for buffer in self._written()
        )
        return keys, values

    def step_index(self, slots: Tensor) -> Tensor:
        """int64 [R A W]: where `write` puts token w of row r that is to stand in slots[r, w], int64 [R, W]."""
        row, head = (torch.arange(count, device=slots.device) for count in (slots.size(0), self.num_heads))
        lines = row[:, None] * self.num_heads + head  # [R, A]
        return (lines[:, :, None] * self.capacity + slots[:, None]).flatten()

    def read(self, num_rows: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first rows and slots: keys and values, each [num_rows, A, length, D]."""
        assert length <= self.capacity, f"{length} slots asked of {self.capacity}"
        keys, values = self._written()
        return keys[:num_rows, :, :length], values[:num_rows, :, :length]

    def row(self, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first slots of one row: keys and values, each [1, A, length, D]."""
        keys, values = self.read(self.num_rows, length)
        return keys[row : row + 1], values[row : row + 1]

    def copy(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """For each (source, target, length): the first slots of row `target` become what `source` had there before."""
        for buffer in self._written():
            pieces = [buffer[source, :, :length].clone() for source, _, length in copies]
            for piece, (_, target, length) in zip(pieces, copies, strict=True):
                buffer[target, :, :length] = piece

    def wipe(self, rows: Sequence[int]) -> None:
        """Zeros in some rows: a value that is not finite would spoil the next sequence there, though it is masked."""
        for buffer in (self._keys, self._values):
            if buffer is not None:
                buffer[list(rows)] = 0.0

    @property
    def num_heads(self) -> int:
        """K"""
        return self._written()[0].size(1)

    @property
    def dtype(self) -> torch.dtype:
        """Of both buffers."""
        return self._written()[0].dtype

    @property
    def num_bytes(self) -> int:
        """Of both buffers; 0 before the first write."""
        return sum(buffer.nbytes for buffer in (self._keys, self._values) if buffer is not None)

    def _written(self) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            raise RuntimeError("this cache was never written")
        return self._keys, self._values

    def _buffers(self, like: Tensor) -> tuple[Tensor, Tensor]:
        if self._keys is None or self._values is None:
            shape = (self.num_rows, like.size(1), self.capacity, like.size(3))
            # Zeros, not empty: a masked slot has weight 0, and 0 * NaN would still be NaN.
            self._keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
            self._values = torch.zeros_like(self._keys)
        return self._keys, self._values


class StepAttend(Protocol):
    """An `Attend` of one token of each of W hypotheses of R rows that says where keys and values are.

    Attributes:
        cache: those before these tokens, to which theirs are added.
        places: int64 [R K W], see `KeyValueCache.step_index`.
        mask: [R, 1, W, length], added to the scores; None: all is seen.
        length: slots that are looked at.
        front: what all queries see besides; None: nothing.
    """

    cache: KeyValueCache
    places: Tensor
    mask: Tensor | None
    length: int
    front: object


def packed_index(rows: Tensor, slots: Tensor, num_heads: int, capacity: int) -> Tensor:
    """Where `KeyValueCache.write` puts packed tokens: int64 [K T], of token t slots[t] of rows[t], int64 [T] each."""
    heads = torch.arange(num_heads, device=slots.device)[:, None]
    return ((rows * num_heads + heads) * capacity + slots).flatten()


def new_caches(likes: Sequence[Tensor], num_rows: int, capacity: int, too_large: str) -> list[KeyValueCache]:
    """Caches of several layers, at their full size.

    Args:
        likes: of each layer, see `KeyValueCache`.
        num_rows, capacity: of all.
        too_large: the error message if they do not fit into the device's memory; "{size}" in it becomes their GB.

    Raises:
        UserError: it has none.
    """
    try:
        return [KeyValueCache(num_rows, capacity, like) for like in likes]
    except (RuntimeError, MemoryError):  # on a GPU torch.OutOfMemoryError, a RuntimeError
        size = 2 * num_rows * capacity * sum(like.nbytes for like in likes) / 1e9
        raise UserError(too_large.format(size=f"{size:,.1f}")) from None
