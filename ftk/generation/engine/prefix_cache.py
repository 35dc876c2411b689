"""Prefix caching: a text that begins as one that a row of the decoder still holds is read from there on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

if TYPE_CHECKING:
    from ftk.generation.engine.request import Frame

Numbers = npt.NDArray[np.int64]

MIN_SHARED_TOKENS = 32
"""Leading tokens below which nothing is taken over: of all but tiny models, reading so few takes as long as one."""


class Copy(NamedTuple):
    """The first `length` slots of row `source`, which go to row `target`."""

    source: int
    target: int
    length: int


class CachedText(NamedTuple):
    """The first tokens of a row and what the model was given with them.

    Attributes:
        tokens: int64 [T].
        inputs: int64 [.., T], by name.
        reader: number of the adapter that read them.
    """

    tokens: Numbers
    inputs: Mapping[str, Numbers]
    reader: int

    @classmethod
    def of(cls, frame: Frame, reader: int) -> CachedText:
        """A frame that was read."""
        return cls(np.asarray(frame.tokens, np.int64), frame.inputs, reader)

    def first(self, length: int) -> CachedText:
        """The first of these tokens."""
        inputs = {name: array[..., :length] for name, array in self.inputs.items()}
        return self._replace(tokens=self.tokens[:length], inputs=inputs)

    def extended(self, tokens: Sequence[int], stride: Mapping[str, Numbers]) -> CachedText:
        """With more tokens behind, whose inputs follow from the last one's by `Frame.stride`."""
        steps = np.arange(1, len(tokens) + 1)
        inputs = {
            name: np.concatenate([array, array[..., -1:] + stride[name][..., None] * steps], axis=-1)
            for name, array in self.inputs.items()
        }
        return CachedText(np.concatenate([self.tokens, np.asarray(tokens, np.int64)]), inputs, self.reader)

    def common(self, other: CachedText) -> int:
        """How many leading tokens are the same, with the same inputs and reader."""
        count = min(len(self.tokens), len(other.tokens))
        if self.reader != other.reader or self.inputs.keys() != other.inputs.keys():
            return 0
        same = self.tokens[:count] == other.tokens[:count]
        for name, array in self.inputs.items():
            alike = array[..., :count] == other.inputs[name][..., :count]
            same = same & alike.all(axis=tuple(range(alike.ndim - 1)))
        return count if same.all() else int(same.argmin())


class PrefixCache:
    """What each row of a decoder holds from its first slot on, of texts in which no token sees what comes later.

    Args:
        num_rows: of the decoder.
    """

    def __init__(self, num_rows: int) -> None:
        self._rows: list[CachedText | None] = [None] * num_rows
        self._used = [0] * num_rows  # number of the reading that used it last
        self._readings = 0
        self._unchecked: tuple[Sequence[int], Tensor] | None = None

    def __getitem__(self, row: int) -> CachedText | None:
        self._check()
        return self._rows[row]

    def read(self, texts: Mapping[int, CachedText], rows: Sequence[int], finite: Tensor) -> None:
        """Rows hold these from now on.

        Args:
            texts: by their rows.
            rows: n.
            finite: bool [n], whether what they hold is. Where it is not, all tokens of the frame may be spoilt.
        """
        self._rows = [texts.get(row, cached) for row, cached in enumerate(self._rows)]
        self._unchecked = rows, finite

    def extend(self, row: int, tokens: Sequence[int], stride: Mapping[str, Numbers]) -> None:
        """A row holds more tokens behind its text, see `CachedText.extended`."""
        own = self._rows[row]
        assert own is not None, "there is a text"
        self._rows[row] = own.extended(tokens, stride)

    def forget(self, rows: Sequence[int]) -> None:
        """Nothing is taken over from these rows any more."""
        for row in rows:
            self._rows[row] = None

    def exchange(self, row: int, other: int) -> None:
        """Each of two rows now holds what the other one held."""
        self._check()
        self._rows[row], self._rows[other] = self._rows[other], self._rows[row]
        self._used[row], self._used[other] = self._used[other], self._used[row]

    def plan(self, rows: Sequence[int], texts: Mapping[int, CachedText], spare: Sequence[int]) -> list[Copy]:
        """Which slots are copied before frames are read; all copies are read before the first one is written.

        Args:
            rows: what they hold is overwritten.
            texts: row -> what is read there next, of those that may be taken over from and may take over.
            spare: rows without a request.

        Returns:
            for each row whose text begins as a row does, a copy of that: perhaps of the row itself. And copies of what
            would be lost, to rows that hold older things.
        """
        self._check()
        self._readings += 1
        copies = [copy for row, own in texts.items() for copy in self._longest(row, own)]
        saved = self._saved(rows, copies, spare)
        found = [(copy, self._rows[copy.source]) for copy in (*saved, *copies)]
        self.forget(rows)
        for row in rows:
            self._used[row] = self._readings
        for copy, cached in found:
            assert cached is not None, "a copy is of what is cached"
            self._rows[copy.target] = cached.first(copy.length)
        return [copy for copy, _ in found]

    def postponed(self, texts: Mapping[int, CachedText]) -> list[int]:
        """Rows whose texts share at least half with one that is read at the same time: they take it over afterwards."""
        self._check()
        early: list[CachedText] = []
        postponed = []
        for row, own in texts.items():
            shared = max(_lengths(own, early), default=0)
            if 2 * shared >= len(own.tokens) and shared > max(_lengths(own, self._rows)) + MIN_SHARED_TOKENS:
                postponed.append(row)
            else:
                early.append(own)
        return postponed

    def _check(self) -> None:
        """Forgets what is not finite, of the newest reading: here the host waits for the device."""
        if self._unchecked is not None:
            rows, finite = self._unchecked
            self._unchecked = None
            self.forget([row for row, is_finite in zip(rows, finite.tolist(), strict=True) if not is_finite])

    def _longest(self, row: int, own: CachedText) -> list[Copy]:
        """The longest beginning that some row holds."""
        lengths = _lengths(own, self._rows)
        length = max(lengths)
        if length == 0:
            return []
        source = row if lengths[row] == length else lengths.index(length)
        self._used[source] = self._readings
        return [Copy(source, row, length)]

    def _saved(self, rows: Sequence[int], copies: Sequence[Copy], spare: Sequence[int]) -> list[Copy]:
        """Copies of what stands in `rows`, and is not continued in any of them, to rows without a request."""
        taken = {copy.source: copy.length for copy in sorted(copies, key=lambda copy: copy.length)}
        sizes = [0 if cached is None else len(cached.tokens) for cached in self._rows]
        # What goes on in another row need not stay where it is, too.
        moved = {row for row, length in taken.items() if 2 * length > sizes[row]}
        # The first rows are those that requests enter first.
        free = [row for row in sorted(spare, reverse=True) if row not in taken or row in moved]
        saved = []
        for row in rows:
            cached = self._rows[row]
            if cached is None or sizes[row] < MIN_SHARED_TOKENS or row in moved or not free:
                continue
            age = {each: -1 if sizes[each] == 0 or each in moved else self._used[each] for each in free}
            oldest = min(free, key=age.__getitem__)
            if age[oldest] <= self._used[row]:
                free.remove(oldest)
                self._used[oldest] = self._used[row]
                saved.append(Copy(row, oldest, sizes[row]))
        return saved


def _lengths(own: CachedText, others: Sequence[CachedText | None]) -> list[int]:
    """Leading tokens that each of the others shares with a text, without its last one, which is read; 0 if too few."""
    last = len(own.tokens) - 1
    if last < MIN_SHARED_TOKENS:
        return [0] * len(others)
    head = own.tokens[:MIN_SHARED_TOKENS].tobytes()
    return [
        0 if other is None or other.tokens[:MIN_SHARED_TOKENS].tobytes() != head else min(last, own.common(other))
        for other in others
    ]
