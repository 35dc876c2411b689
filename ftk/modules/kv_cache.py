"""Keys and values of one attention layer, in buffers made once and written in place."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where the tokens of a padded chunk go: P real tokens, each with its row, its slot and its column.

    All int64 [P]: token `column` of `row` is written to `slot` of that row. Padding has no place, so rows of
    different lengths lie without holes, each at its own write position.
    """

    rows: Tensor
    slots: Tensor
    columns: Tensor


class KeyValueCache:
    """Keys and values of one layer: two buffers [rows, A, capacity, D], made at the first write.

    Made at the first write, because only then dtype, device and the number of (local) heads are known.

    Args:
        num_rows: sequences that are held.
        capacity: slots of each row.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def write(self, key: Tensor, value: Tensor, places: Places) -> None:
        """Writes the real tokens of a padded chunk: key and value [rows, A, T, D]."""
        keys, values = self._buffers(key)
        rows, slots, columns = places
        keys[rows, :, slots] = key[rows, :, columns]  # [P, A, D]
        values[rows, :, slots] = value[rows, :, columns]

    def write_slot(self, key: Tensor, value: Tensor, slot: int) -> None:
        """Writes one token to the same slot of every row: key and value [rows, A, 1, D]."""
        keys, values = self._buffers(key)
        keys[:, :, slot] = key[:, :, 0]
        values[:, :, slot] = value[:, :, 0]

    def read(self, length: int) -> tuple[Tensor, Tensor]:
        """Views of the first `length` slots: keys and values, each [rows, A, length, D]."""
        assert length <= self.capacity, f"{length} slots asked of {self.capacity}"
        keys, values = self._written()
        return keys[: self.num_rows, :, :length], values[: self.num_rows, :, :length]

    def select(self, rows: Tensor, length: int) -> None:
        """Row i becomes what row rows[i] was, in its first `length` slots; len(rows) rows stay.

        Args:
            rows: int64 [R] with R at most the present number of rows.
            length: slots that matter.
        """
        for buffer in self._written():
            buffer[: rows.size(0), :, :length] = buffer[rows, :, :length]
        self.num_rows = rows.size(0)

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
        return self._keys[: self.num_rows], self._values[: self.num_rows]
