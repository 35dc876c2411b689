"""Hidden states of what a decoder has read, for strategies that compare tokens by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.modules.kv_cache import Places


class HiddenStates:
    """Final hidden states of a decoder's rows, each of length 1, in a buffer made once: what is settled, what is new.

    Args:
        num_rows: rows of the decoder.
        capacity: most tokens that any prompt will have settled.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self.buffer: Tensor | None = None  # float32 [rows, capacity, H]
        self.there: Tensor | None = None  # bool [rows, capacity]
        self.newest: Tensor | None = None  # float32 [rows in use, W, H]
        self._nearest: Tensor | None = None  # of `newest`, once somebody has asked

    def clear(self, rows: Sequence[int]) -> None:
        """Forgets what these rows have settled."""
        self._nearest = None
        if self.there is not None:
            self.there[list(rows)] = False

    def settle(self, hidden: Tensor, places: Places) -> None:
        """Adds the real tokens of a chunk [n, T, H]."""
        if self.buffer is None or self.there is None:
            shape = (self.num_rows, self.capacity, hidden.size(-1))
            self.buffer = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
            self.there = torch.zeros(shape[:2], dtype=torch.bool, device=hidden.device)
        self._nearest = None
        rows, slots, members, columns = places
        self.buffer[rows, slots] = F.normalize(hidden[members, columns].float(), dim=-1)
        self.there[rows, slots] = True

    def look(self, hidden: Tensor) -> None:
        """Takes the states of the newest token of each hypothesis, [R, W, H]; they are not settled."""
        self.newest, self._nearest = F.normalize(hidden.float(), dim=-1), None

    @property
    def nearest(self) -> Tensor:
        """float32 [rows in use, W]: of the newest tokens the greatest cosine to anything that is settled in their row.

        For all rows at once and in place: the searches under way share it, and nothing large is copied.
        """
        if self._nearest is None:
            assert self.newest is not None, "no step was made"
            assert self.buffer is not None, "nothing was read"
            assert self.there is not None, "nothing was read"
            num_rows = self.newest.size(0)
            cosines = self.newest @ self.buffer[:num_rows].mT  # [R, W, capacity]
            self._nearest = cosines.masked_fill(~self.there[:num_rows, None], -1.0).amax(-1)
        return self._nearest

    def of(self, rows: Tensor) -> RowStates:
        """What there is of some rows, int64 [N]."""
        return RowStates(self, rows)


class RowStates:
    """Hidden states of N prompts, wherever in the decoder their rows are; see `HiddenStates.of`."""

    def __init__(self, states: HiddenStates, rows: Tensor) -> None:
        self._states = states
        self._rows = rows

    def keep(self, rows: Tensor) -> RowStates:
        """Of the prompts only `rows`, int64 [R], in this order."""
        return RowStates(self._states, self._rows[rows])

    @property
    def settled(self) -> Tensor:
        """float32 [N, capacity, H]: context, filled blanks and start tokens; anything where `mask` is False."""
        assert self._states.buffer is not None, "nothing was read"
        return self._states.buffer[self._rows]

    @property
    def mask(self) -> Tensor:
        """bool [N, capacity]: where there is a token."""
        assert self._states.there is not None, "nothing was read"
        return self._states.there[self._rows]

    @property
    def nearest(self) -> Tensor:
        """float32 [N, W]: of `last` the greatest cosine to anything in `settled`."""
        return self._states.nearest[self._rows]

    @property
    def last(self) -> Tensor:
        """float32 [N, W, H]: the newest token of each hypothesis."""
        assert self._states.newest is not None, "no step was made"
        return self._states.newest[self._rows]
