"""Hidden states of what a decoder has read, for strategies that compare tokens by them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ftk.modules.kv_cache import Places


class HiddenStates:
    """Final hidden states of N prompts, each of length 1, in a buffer made once: what is settled, what is new.

    Args:
        num_rows: N.
        capacity: most tokens that any prompt will have settled.
    """

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows = num_rows
        self.capacity = capacity
        self._buffer: Tensor | None = None
        self._mask: Tensor | None = None
        self._last: Tensor | None = None

    def settle(self, hidden: Tensor, places: Places) -> None:
        """Adds the real tokens of a padded chunk [N, T, H]."""
        if self._buffer is None or self._mask is None:
            shape = (self.num_rows, self.capacity, hidden.size(-1))
            self._buffer = torch.zeros(shape, dtype=torch.float32, device=hidden.device)
            self._mask = torch.zeros(shape[:2], dtype=torch.bool, device=hidden.device)
        rows, slots, columns = places
        self._buffer[rows, slots] = F.normalize(hidden[rows, columns].float(), dim=-1)
        self._mask[rows, slots] = True

    def look(self, hidden: Tensor) -> None:
        """Takes the states of the newest token of each hypothesis, [N, W, H]; they are not settled."""
        self._last = F.normalize(hidden.float(), dim=-1)

    def keep(self, rows: Tensor) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order."""
        self.num_rows = rows.size(0)
        for name in ("_buffer", "_mask", "_last"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else value[rows])

    @property
    def settled(self) -> Tensor:
        """float32 [N, capacity, H]: context, filled blanks and start tokens; zeros where `mask` is False."""
        assert self._buffer is not None, "nothing was read"
        return self._buffer

    @property
    def mask(self) -> Tensor:
        """bool [N, capacity]: where there is a token."""
        assert self._mask is not None, "nothing was read"
        return self._mask

    @property
    def last(self) -> Tensor:
        """float32 [N, W, H]: the newest token of each hypothesis."""
        assert self._last is not None, "no step was made"
        return self._last
