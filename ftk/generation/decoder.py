"""Drives a model's layers with caches as their `attend`: tokens in, logits of the next token out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.generation.blanks import Chunk
from ftk.generation.hidden_states import HiddenStates
from ftk.modules.kv_cache import KeyValueCache, Places


class DecodableModel(Protocol):
    """What a model must offer to be decoded with caches; each layer is called `layer(hidden, attend)`."""

    layers: nn.ModuleList
    final_norm: nn.Module

    def embed(self, tokens: Tensor, position_ids: Tensor) -> Tensor:
        """tokens [B, T], position_ids [B, 2, T] -> [B, T, H]"""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V]"""


class CachedDecoder:
    """Decodes N prompts, W hypotheses of each, without ever reading a token twice.

    Per layer there are two caches. The prefix holds what is settled, once per prompt: its context and its
    filled blanks. The branch holds the tokens of the present answer, once per hypothesis. Reordering
    hypotheses therefore moves the present answers only. Memory in bytes, for values of b bytes:
    2 b L H (N * prefix_capacity + N * W * branch_capacity).

    Args:
        model: see `DecodableModel`.
        context_lengths: N numbers: leading tokens of each prompt that all its tokens see.
        width: W.
        prefix_capacity: most tokens that any prompt will have settled.
        branch_capacity: most tokens of an answer that are read while it is written.
        device: where tokens go.
        states: is told the final hidden states of all that is read; for searches that ask for them.
    """

    def __init__(
        self,
        model: DecodableModel,
        context_lengths: Sequence[int],
        width: int,
        prefix_capacity: int,
        branch_capacity: int,
        device: torch.device,
        states: HiddenStates | None = None,
    ) -> None:
        self.model = model
        self.width = width
        self.device = device
        self.states = states
        self.context_lengths = np.asarray(context_lengths, dtype=np.int64)  # [N]
        self.prefix_lengths = np.zeros(len(context_lengths), dtype=np.int64)  # [N]
        num_rows = len(context_lengths)
        self.prefixes = [KeyValueCache(num_rows, prefix_capacity) for _ in model.layers]
        self.branches = [KeyValueCache(num_rows * width, branch_capacity) for _ in model.layers]
        self.branch_length = 0
        self._prefix_mask: Tensor | None = None

    def read(self, chunks: Sequence[Chunk]) -> Tensor:
        """Settles one chunk per prompt, each behind what the prompt has already, and drops the branches.

        Args:
            chunks: N chunks; they may differ in length.

        Returns:
            logits [N, V] of the token after each chunk.
        """
        lengths = np.array([len(chunk.tokens) for chunk in chunks])  # [N]
        starts, ends = self.prefix_lengths, self.prefix_lengths + lengths
        columns = np.arange(lengths.max())  # [T]
        slots = starts[:, None] + columns  # [N, T]
        rows, real = np.nonzero(columns < lengths[:, None])
        places = Places(*(self._to_device(part) for part in (rows, slots[rows, real], real)))
        keys = np.arange(ends.max())  # [S]
        visible = (keys < self.context_lengths[:, None, None]) | (keys <= slots[:, :, None])  # [N, T, S]
        mask = self._to_device(visible)[:, None]  # [N, 1, T, S]

        tokens = self._to_device(_pad([chunk.tokens for chunk in chunks]))  # [N, T]
        text, block = _pad([c.text_positions for c in chunks]), _pad([c.block_positions for c in chunks])
        position_ids = self._to_device(np.stack((text, block), axis=1))  # [N, 2, T]
        hidden = self.model.embed(tokens, position_ids)  # [N, T, H]
        for layer, cache in zip(self.model.layers, self.prefixes, strict=True):
            hidden = layer(hidden, _PrefixAttention(cache, places, mask))
        if self.states is not None:
            self.states.settle(self.model.final_norm(hidden), places)
        last = self._to_device(lengths - 1)
        hidden = hidden[torch.arange(len(chunks), device=self.device), last]  # [N, H]

        self.prefix_lengths = ends
        self.branch_length = 0
        unseen = keys >= ends[:, None]  # [N, S]
        self._prefix_mask = self._to_device(unseen)[:, None, None] if unseen.any() else None  # [N, 1, 1, S]
        return self.model.logits(self.model.final_norm(hidden))

    def step(self, tokens: Tensor, text_positions: Tensor, block_position: int) -> Tensor:
        """Reads one more token of each hypothesis.

        Args:
            tokens: [N, W] int64.
            text_positions: [N] int64, index of the blank that each prompt is filling.
            block_position: place of the token within its blank, the same for all.

        Returns:
            logits [N, W, V] of the token after it.
        """
        num_rows, width = tokens.shape
        text = text_positions[:, None].expand(num_rows, width).reshape(-1, 1)  # [N W, 1]
        position_ids = torch.stack((text, torch.full_like(text, block_position)), dim=1)  # [N W, 2, 1]
        hidden = self.model.embed(tokens.reshape(-1, 1), position_ids)  # [N W, 1, H]
        prefix_length = int(self.prefix_lengths.max())
        for layer, prefix, branch in zip(self.model.layers, self.prefixes, self.branches, strict=True):
            attend = _BranchAttention(prefix, branch, prefix_length, self._prefix_mask, self.branch_length, width)
            hidden = layer(hidden, attend)
        self.branch_length += 1
        hidden = self.model.final_norm(hidden[:, 0])  # [N W, H]
        if self.states is not None:
            self.states.look(hidden.unflatten(0, (num_rows, width)))
        return self.model.logits(hidden).unflatten(0, (num_rows, width))

    def reorder(self, sources: Tensor) -> None:
        """Hypothesis w of prompt n becomes a copy of its hypothesis sources[n, w]; [N, W] int64."""
        if self.branch_length == 0:
            return
        first = torch.arange(sources.size(0), device=self.device)[:, None] * self.width
        rows = (first + sources).flatten()  # [N W]
        for branch in self.branches:
            branch.select(rows, self.branch_length)

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with some of the prompts only: row i becomes what row rows[i] was. Drops the branches."""
        index = self._to_device(np.asarray(rows, dtype=np.int64))
        length = int(self.prefix_lengths.max())
        self.context_lengths = self.context_lengths[list(rows)]
        self.prefix_lengths = self.prefix_lengths[list(rows)]
        for prefix, branch in zip(self.prefixes, self.branches, strict=True):
            prefix.select(index, length)
            branch.num_rows = len(rows) * self.width
        self.branch_length = 0
        if self.states is not None:
            self.states.keep(index)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)


class _PrefixAttention(NamedTuple):
    """`attend` for a chunk: writes it behind the prefix, then sees the prefix and itself through the mask."""

    cache: KeyValueCache
    places: Places
    mask: Tensor  # [N, 1, T, S]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [N, A, T, D] -> [N, A, T, D]"""
        self.cache.write(key, value, self.places)
        keys, values = self.cache.read(self.mask.size(-1))  # [N, A, S, D]
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=self.mask)


class _BranchAttention(NamedTuple):
    """`attend` for one token of each hypothesis: it sees its prompt's prefix and its own answer so far.

    The hypotheses of a prompt stand side by side as queries over the one copy of their prefix.
    """

    prefix: KeyValueCache
    branch: KeyValueCache
    prefix_length: int
    prefix_mask: Tensor | None  # [N, 1, 1, S], True where there is nothing to see
    slot: int
    width: int

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query, key, value [N W, A, 1, D] -> [N W, A, 1, D]"""
        self.branch.write_slot(key, value, self.slot)
        prefix_keys, prefix_values = self.prefix.read(self.prefix_length)  # [N, A, S, D]
        branch_keys, branch_values = self.branch.read(self.slot + 1)  # [N W, A, R, D]
        query = query * query.size(-1) ** -0.5

        prefix_scores = self._by_prompt(query) @ prefix_keys.mT  # [N, A, W, S]
        if self.prefix_mask is not None:
            prefix_scores = prefix_scores.masked_fill(self.prefix_mask, float("-inf"))
        branch_scores = self._by_prompt(query @ branch_keys.mT)  # [N, A, W, R]
        scores = torch.cat((prefix_scores, branch_scores), dim=-1)  # [N, A, W, S + R]
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        on_prefix, on_branch = weights.split((self.prefix_length, self.slot + 1), dim=-1)
        return self._by_hypothesis(on_prefix @ prefix_values) + self._by_hypothesis(on_branch) @ branch_values

    def _by_prompt(self, states: Tensor) -> Tensor:
        """[N W, A, 1, X] -> [N, A, W, X]"""
        return states.squeeze(2).unflatten(0, (-1, self.width)).transpose(1, 2)

    def _by_hypothesis(self, states: Tensor) -> Tensor:
        """[N, A, W, X] -> [N W, A, 1, X]"""
        return states.transpose(1, 2).flatten(0, 1).unsqueeze(2)


def _pad(lists: Sequence[list[int]]) -> np.ndarray:
    """Rows of one length, filled up with zeros, whose results nobody reads: int64 [N, T]."""
    padded = np.zeros((len(lists), max(map(len, lists))), dtype=np.int64)
    for row, one in zip(padded, lists, strict=True):
        row[: len(one)] = one
    return padded
