"""Drives a model's layers with caches as their `attend`: tokens in, logits of the next token out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ftk.generation.blanks import Chunk
from ftk.generation.device import sent
from ftk.generation.hidden_states import HiddenStates
from ftk.generation.reading import Where, read_packed, read_padded
from ftk.modules.attention import fused_attention
from ftk.modules.kv_cache import KeyValueCache

if TYPE_CHECKING:
    from ftk.models.base import Backbone


class CachedDecoder:
    """Decodes prompts, W hypotheses of each, without ever reading a token twice.

    It has rows, each for one prompt at a time, with its own write position: prompts come (`enter`, `read`) and go
    (`leave`) while others go on. A row's slots hold first what is settled, its context and filled blanks: the one
    copy that all its hypotheses see. Behind it stand the tokens of the present answer, those of all hypotheses
    side by side, W a step; a mask says which of them a hypothesis descends from. Reordering hypotheses changes
    the mask alone: no key and no value is ever moved. Memory in bytes, for values of b bytes:

        2 b L H rows (prefix_capacity + W branch_capacity)

    Args:
        model: its layers, behind `embed` and before `finish` and `head`, get a cache as their `attend`.
        num_rows: prompts at once.
        width: W.
        prefix_capacity: most tokens that any prompt will have settled.
        branch_capacity: most tokens of an answer that are read while it is written.
        device: where tokens go.
        in_blocks: whether places within a blank are counted (2-D positions) or always 1.
        states: takes the hidden states of all that is read, for strategies that want them.
        packed: whether `read` reads chunks one behind the other, without padding; else side by side.
    """

    def __init__(
        self,
        model: Backbone,
        num_rows: int,
        width: int,
        prefix_capacity: int,
        branch_capacity: int,
        device: torch.device,
        in_blocks: bool = True,
        states: HiddenStates | None = None,
        packed: bool = False,
    ) -> None:
        self.model = model
        self.num_rows = num_rows
        self.width = width
        self.capacity = prefix_capacity + width * branch_capacity
        self.device = device
        self.in_blocks = in_blocks
        self.states = states
        self.packed = packed
        self.caches = [KeyValueCache(num_rows, self.capacity) for _ in model.layers]
        # Of each row, on the host: nothing here waits for the device.
        self.context_lengths = np.zeros(num_rows, dtype=np.int64)  # what all its tokens see
        self.prefix_lengths = np.zeros(num_rows, dtype=np.int64)  # what is settled
        self.branch_lengths = np.zeros(num_rows, dtype=np.int64)  # tokens of the present answer
        self.blanks = np.zeros(num_rows, dtype=np.int64)  # place in the text of the blank that is being filled
        self.live = np.zeros(num_rows, dtype=np.int64)  # 1 where an answer is being written
        self._mask: Tensor | None = None  # [rows, W, capacity]: 0 for what a hypothesis sees, -inf elsewhere
        self._pointers: _Pointers | None = None

    def enter(self, rows: Sequence[int], context_lengths: Sequence[int]) -> None:
        """New prompts take these rows; the leading `context_lengths` of their tokens are seen by all of them."""
        index = list(rows)
        self.context_lengths[index] = context_lengths
        self.prefix_lengths[index] = 0
        if self.states is not None:
            self.states.clear(index)

    def leave(self, rows: Sequence[int]) -> None:
        """The answers that these rows are writing are complete."""
        self.live[list(rows)] = 0
        self.branch_lengths[list(rows)] = 0
        self._pointers = None

    def read(self, rows: Sequence[int], chunks: Sequence[Chunk]) -> Tensor:
        """Settles a chunk in each of the rows, behind what it has already; a new answer begins there.

        Args:
            rows: n different ones; other rows are left alone.
            chunks: n, of any lengths.

        Returns:
            logits [n, V] of the token after each chunk.
        """
        index = np.asarray(rows)
        where = Where(index, self.prefix_lengths[index], self.context_lengths[index])
        reading = (read_packed if self.packed else read_padded)(chunks, where, self.device)
        hidden = self.model.embed(reading.tokens, position_ids=reading.position_ids)  # [B, T, H]
        for layer, cache in zip(self.model.layers, self.caches, strict=True):
            hidden = layer(hidden, reading.attend(cache))
        if self.states is not None:
            self.states.settle(self.model.finish(hidden), reading.places)
        hidden = hidden[reading.last]  # [n, H]

        self.prefix_lengths[index] += [len(chunk.tokens) for chunk in chunks]
        self.branch_lengths[index] = 0
        self.blanks[index] = [chunk.text_positions[-1] for chunk in chunks]
        self.live[index] = 1
        self._pointers = None
        self._see_settled(index)
        return self.model.head(self.model.finish(hidden))

    def step(self, tokens: Tensor) -> Tensor:
        """Reads one more token of each hypothesis.

        Args:
            tokens: [R, W] int64 for the first R rows; those of rows that write no answer are anything.

        Returns:
            logits [R, W, V] of the token after it; those of rows that write no answer mean nothing.
        """
        num_rows = tokens.size(0)
        if self._pointers is None or self._pointers.num_rows != num_rows:
            self._pointers = self._point(num_rows)
        pointers = self._pointers
        lengths = self.prefix_lengths[:num_rows] + self.width * (self.branch_lengths + self.live)[:num_rows]
        length = int(lengths.max())
        mask: Tensor | None = None
        if self._mask is not None:
            self._mask.view(-1).index_fill_(0, pointers.marks, 0.0)
            if self.width > 1 or (lengths < length).any():
                mask = self._mask[:num_rows, None, :, :length]  # [R, 1, W, S]
        hidden = self.model.embed(tokens, position_ids=pointers.position_ids)  # [R, W, H]
        for layer, cache in zip(self.model.layers, self.caches, strict=True):
            hidden = layer(hidden, _StepAttention(cache, pointers.places, mask, length))
        self.branch_lengths += self.live
        pointers.advance()
        hidden = self.model.finish(hidden)  # [R, W, H]
        if self.states is not None:
            self.states.look(hidden)
        return self.model.head(hidden)

    def reorder(self, sources: Tensor) -> None:
        """In the first R rows hypothesis w of row r continues what was sources[r, w]: int64 [R, W]."""
        if self._mask is not None:
            num_rows = sources.size(0)
            rows = torch.arange(num_rows, device=self.device)[:, None]
            self._mask[:num_rows] = self._mask[rows, sources]

    def move(self, source: int, target: int) -> None:
        """The prompt in row `source` goes on in row `target`."""
        length = int(self.prefix_lengths[source] + self.width * self.branch_lengths[source])
        for cache in self.caches:
            cache.move(source, target, length)
        if self._mask is not None:
            self._mask[target] = self._mask[source]
        for column in (self.context_lengths, self.prefix_lengths, self.branch_lengths, self.blanks, self.live):
            column[target] = column[source]
        self.leave([source])

    @property
    def num_bytes(self) -> int:
        """Of all keys and values."""
        return sum(cache.num_bytes for cache in self.caches)

    def _see_settled(self, rows: np.ndarray) -> None:
        """From now on the hypotheses of these rows see what is settled there, and nothing else."""
        if not self.caches:
            return
        if self._mask is None:
            shape = (self.num_rows, self.width, self.capacity)
            self._mask = torch.full(shape, float("-inf"), dtype=self.caches[0].dtype, device=self.device)
            self._mask[:, :, 0] = 0.0  # rows that were never entered must see something, or they hold NaN
        unseen = np.arange(self.capacity) >= self.prefix_lengths[rows][:, None]  # [n, capacity]
        lines = torch.zeros(unseen.shape, dtype=self._mask.dtype, device=self.device)
        self._mask[self._to_device(rows)] = lines.masked_fill_(self._to_device(unseen), float("-inf"))[:, None]

    def _point(self, num_rows: int) -> _Pointers:
        """Where the next step reads and writes; it is kept up on the device until rows come or go."""
        width, hypotheses = self.width, np.arange(self.width)
        branch, live = self.branch_lengths[:num_rows], self.live[:num_rows]
        slots = (self.prefix_lengths[:num_rows] + width * branch)[:, None] + hypotheses  # [R, W]
        marks = (np.arange(num_rows)[:, None] * width + hypotheses) * self.capacity + slots
        block = branch + 2 if self.in_blocks else np.ones_like(branch)
        position_ids = np.stack((self.blanks[:num_rows], np.where(live, block, 0)), axis=1)  # [R, 2]
        position_ids = np.repeat(position_ids[:, :, None], width, axis=2)  # [R, 2, W]
        places = self.caches[0].step_index(self._to_device(slots)) if self.caches else None
        steps = np.repeat(live[:, None], width, axis=1)  # [R, W]
        num_heads = 1 if places is None else places.numel() // slots.size
        return _Pointers(
            num_rows,
            places,
            self._to_device(marks.flatten()),
            self._to_device(position_ids),
            self._to_device(np.repeat(steps[:, None] * width, num_heads, axis=1).flatten()),
            self._to_device(steps.flatten() * width),
            self._to_device(steps if self.in_blocks else np.zeros_like(steps)),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return sent(torch.from_numpy(np.ascontiguousarray(array)), self.device)


@dataclass
class _Pointers:
    """Where a step reads and writes, for R rows, and how far that moves from step to step (not at all in rows that
    write no answer, so that these overwrite one place again and again)."""

    num_rows: int
    places: Tensor | None  # [R A W], see `KeyValueCache.step_index`; None for a model without layers
    marks: Tensor  # [R W]: into the mask, what each hypothesis writes and is to see
    position_ids: Tensor  # [R, 2, W]
    places_step: Tensor  # [R A W]
    marks_step: Tensor  # [R W]
    block_step: Tensor  # [R, W]

    def advance(self) -> None:
        """On to the next step, in place."""
        if self.places is not None:
            self.places.add_(self.places_step)
            self.marks.add_(self.marks_step)
        self.position_ids[:, 1].add_(self.block_step)


class _StepAttention(NamedTuple):
    """`attend` for one token of each hypothesis: the W of a row stand side by side as queries over its one buffer."""

    cache: KeyValueCache
    places: Tensor | None  # [R A W]
    mask: Tensor | None  # [R, 1, W, S], added to the scores; None where all is seen
    length: int  # S

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None = None, scale: float | None = None
    ) -> Tensor:
        """query, key, value [R, A, W, D] -> [R, A, W, D]"""
        assert self.places is not None, "there are layers"
        self.cache.write_at(key, value, self.places)
        keys, values = self.cache.read(query.size(0), self.length)  # [R, A, S, D]
        # One query a row is no work for the fused kernels of a CPU: 48 microseconds against 33 in float32 and 240
        # against 125 in bfloat16 (12 heads of 64, 256 slots, one thread).
        if query.device.type != "cpu" or (query.dtype != torch.float32 and query.size(2) > 1):
            return fused_attention(query, keys, values, self.mask, bias=bias, scale=scale)
        scores = (query * (query.size(-1) ** -0.5 if scale is None else scale)) @ keys.mT  # [R, A, W, S]
        if self.mask is not None:
            scores += self.mask
        if bias is not None:
            scores += bias
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
