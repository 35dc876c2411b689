"""Which keys a query may see, written once and offered in three forms: boolean, additive, flex BlockMask."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


class Visibility(NamedTuple):
    """Which keys a query may see, both numbered by their places in a sequence:

        (key < prefix  or  causal and branch)  and  document  and  key < length  and  (within the window  or  global)

    Attributes:
        prefix: int64 [B], leading tokens that all tokens see (Du et al. 2022, 2.1; 0: none); None: none.
        causal: whether a token sees nothing that is later than itself, apart from the prefix.
        branches: int64 [B, S], several continuations of one context: a token sees those of its own number and, as all
            do, those of number 0; None: all are of one branch.
        documents: int64 [B, S], a token sees only those of its own number; None: all are of one document.
        length: int64 [B], number of valid keys: later ones are masked; 0 counts as 1; None: all are valid.
        window: tokens that a token sees up to itself, itself included (Beltagy et al. 2020), and where nothing is
            causal as many on its other side; None: no limit.
        positions: int64 [B, S], by which the window counts; None: by places.
        global_keys: int64 [B, S], not 0 for keys that are seen from outside of their window too; None: there are none.
        num_documents: where the host knows it: numbers in `documents` are from -1 to this, exclusive.
    """

    prefix: Tensor | None = None
    causal: bool = True
    branches: Tensor | None = None
    documents: Tensor | None = None
    length: Tensor | None = None
    window: int | None = None
    positions: Tensor | None = None
    global_keys: Tensor | None = None
    num_documents: int | None = None

    def sees(self, batch: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query sees a key: bool; row, query's place and key's place, int64, of any shapes that broadcast."""
        seen = key <= query if self.causal else (key <= query) | True  # of the shape of both
        if self.branches is not None:
            branch = self.branches[batch, key]
            seen = seen & ((branch == 0) | (branch == self.branches[batch, query]))
        if self.prefix is not None:
            seen = seen | (key < self.prefix[batch])
        if self.documents is not None:
            seen = seen & (self.documents[batch, query] == self.documents[batch, key])
        if self.length is not None:
            # One at least, as the softmax of a query without a key is NaN.
            seen = seen & (key < self.length[batch].clamp(min=1))
        if self.window is not None:
            # Padding sees what the last token sees, as the softmax of a query without a key is NaN.
            place = query if self.length is None else torch.minimum(query, (self.length[batch] - 1).clamp(min=0))
            behind = place - key
            if self.positions is not None:
                behind = self.positions[batch, place] - self.positions[batch, key]
            near = behind < self.window
            if not self.causal:
                near = near & (-behind < self.window)
            if self.global_keys is not None:
                near = near | (self.global_keys[batch, key] != 0)
            seen = seen & near
        return seen

    @property
    def is_causal_alone(self) -> bool:
        """Whether this is the lower triangle, for which there are kernels without a mask."""
        return self.causal and self._given is None and self.window is None

    @property
    def sees_all(self) -> bool:
        """Whether every token sees every other."""
        return not self.causal and self._given is None and self.window is None

    @property
    def in_runs(self) -> bool:
        """Whether the keys that a query sees lie next to each other, and those of a row's queries in two ways at most:
        behind a prefix or causally, or all up to a length; within documents, which are brought together for that."""
        if any(part is not None for part in (self.branches, self.window, self.positions, self.global_keys)):
            return False
        if self.causal:
            return self.length is None and (self.documents is None or self.num_documents is not None)
        return self.prefix is None and self.documents is None

    def boolean(self, queries: Tensor, keys: Tensor) -> Tensor:
        """The mask, True where a query may see a key.

        Args:
            queries: int64 [T], or [B, T] where they differ from row to row.
            keys: int64 [S].

        Returns:
            bool [B, 1, T, S]; [1, 1, T, S] where it is the same for all rows.
        """
        batch = torch.arange(self.num_rows, device=keys.device)
        queries = queries[None] if queries.dim() == 1 else queries  # [1 or B, T]
        return self.sees(batch[:, None, None], queries[:, :, None], keys).unsqueeze(1)

    def additive(self, queries: Tensor, keys: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """The mask to be added to scores: 0 where a query may see a key, -inf elsewhere. Arguments as `boolean`'s."""
        mask = self.boolean(queries, keys)
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, float("-inf"))

    def blocks(
        self, num_tokens: int, device: torch.device, block_size: int = 128, num_keys: int | None = None
    ) -> BlockMask:
        """The mask of a whole sequence for `torch.nn.attention.flex_attention`, in blocks of `block_size` squared.

        `num_keys`: of the keys, where they are those of another sequence.
        """

        def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return self.sees(batch, query, key)

        if self.in_runs and self.prefix is not None and self.documents is None and num_keys is None:
            return _blocks_of_prefix(self.prefix, num_tokens, block_size, mask_mod)
        return create_block_mask(
            mask_mod,
            B=None if self._given is None else self._given.size(0),
            H=None,
            Q_LEN=num_tokens,
            KV_LEN=num_tokens if num_keys is None else num_keys,
            device=device,
            BLOCK_SIZE=block_size,
        )

    @property
    def num_rows(self) -> int:
        """B; 1 where all rows are the same."""
        return 1 if self._given is None else self._given.size(0)

    @property
    def _given(self) -> Tensor | None:
        """One of the tensors, which all have a row for each sequence."""
        given = (self.prefix, self.branches, self.documents, self.length, self.positions, self.global_keys)
        return next((tensor for tensor in given if tensor is not None), None)


def _blocks_of_prefix(prefix: Tensor, num_tokens: int, block_size: int, mask_mod: Callable[..., Tensor]) -> BlockMask:
    """Causal behind a prefix, int64 [B]: the blocks that `create_block_mask` finds by making the whole mask."""
    place = torch.arange(-(-num_tokens // block_size), device=prefix.device)  # [N]
    query, end = place[:, None], prefix[:, None, None]
    is_seen = (place * block_size < end) | (place <= query)  # [B, N, N]
    is_whole = (place + 1) * block_size <= num_tokens
    is_full = (((place + 1) * block_size <= end) | (place < query)) & is_whole & is_whole[:, None]
    numbers, indices = zip(*(_first_marked(marks[:, None]) for marks in (is_seen & ~is_full, is_full)), strict=True)
    return BlockMask.from_kv_blocks(
        numbers[0], indices[0], numbers[1], indices[1], block_size, mask_mod, (num_tokens, num_tokens)
    )


def _first_marked(marks: Tensor) -> tuple[Tensor, Tensor]:
    """bool [..., N] -> int32 [...], how many are set, and [..., N], their places before those of the others"""
    order = marks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return marks.sum(-1, dtype=torch.int32), order.int().contiguous()


def marked_places(marks: Tensor) -> Tensor:
    """Places of the tokens that are not 0: int64 [B, T] -> int64 [B, G], G the most of a row.

    Rows that have fewer are filled up with places of other tokens. In an exported program G is T.
    """
    is_marked = marks != 0
    order = is_marked.int().argsort(dim=1, descending=True, stable=True)
    return order if torch.compiler.is_exporting() else order[:, : int(is_marked.sum(1).max())]
