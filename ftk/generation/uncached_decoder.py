"""Decodes models of which nothing is known but how they are called: all is read anew for each token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from ftk.generation.blanks import Chunk


class UncachedDecoder:
    """What `CachedDecoder` does, for any module with the toolkit's contract, at the cost of reading everything again.

    Args:
        model: called as `model(tokens [B, T], position_ids=[B, 2, T], context_length=[B]) -> logits [B, T, V]`.
        num_rows: prompts at once.
        width: W, hypotheses of each.
        branch_capacity: most tokens of an answer that are read while it is written.
        device: where tokens go.
        in_blocks: whether places within a blank are counted (2-D positions) or always 1.
    """

    def __init__(
        self,
        model: nn.Module,
        num_rows: int,
        width: int,
        branch_capacity: int,
        device: torch.device,
        in_blocks: bool = True,
    ) -> None:
        self.model = model
        self.device = device
        self.in_blocks = in_blocks
        self.rows = [_Row() for _ in range(num_rows)]
        self.written = torch.zeros(num_rows, width, branch_capacity, dtype=torch.int64, device=device)

    def enter(self, rows: Sequence[int], context_lengths: Sequence[int]) -> None:
        """As `CachedDecoder.enter`."""
        for row, length in zip(rows, context_lengths, strict=True):
            self.rows[row] = _Row(length)

    def leave(self, rows: Sequence[int]) -> None:
        """As `CachedDecoder.leave`."""
        for row in rows:
            self.rows[row].live, self.rows[row].length = False, 0

    def read(self, rows: Sequence[int], chunks: Sequence[Chunk]) -> Tensor:
        """As `CachedDecoder.read`: logits [n, V] of the token after each chunk."""
        for row, chunk in zip((self.rows[row] for row in rows), chunks, strict=True):
            row.settled = Chunk(*(old + new for old, new in zip(row.settled, chunk, strict=True)))
            row.live, row.length = True, 0
        return self._logits(rows, 1)[:, 0]

    def step(self, tokens: Tensor) -> Tensor:
        """As `CachedDecoder.step`: tokens [R, W] -> logits [R, W, V], 0 in rows that write no answer."""
        rows = [row for row in range(tokens.size(0)) if self.rows[row].live]
        for row in rows:
            self.written[row, :, self.rows[row].length] = tokens[row]
            self.rows[row].length += 1
        found = self._logits(rows, tokens.size(1))  # [n, W, V]
        logits = found.new_zeros(tokens.size(0), *found.shape[1:])
        logits[torch.tensor(rows, device=self.device)] = found
        return logits

    def reorder(self, sources: Tensor) -> None:
        """As `CachedDecoder.reorder`: int64 [R, W]."""
        rows = torch.arange(sources.size(0), device=self.device)[:, None]
        self.written[: sources.size(0)] = self.written[rows, sources]

    def move(self, source: int, target: int) -> None:
        """As `CachedDecoder.move`."""
        self.written[target] = self.written[source]
        self.rows[target] = replace(self.rows[source])
        self.leave([source])

    def _logits(self, rows: Sequence[int], width: int) -> Tensor:
        """The first `width` hypotheses of n rows, read from the beginning: logits [n, W, V] of their next tokens."""
        members = [self.rows[row] for row in rows]
        lengths = np.array([len(member.settled.tokens) + member.length for member in members])  # [n]
        tokens = torch.zeros(len(rows), width, int(lengths.max()), dtype=torch.int64, device=self.device)
        position_ids = np.zeros((len(rows), 2, int(lengths.max())), dtype=np.int64)
        for index, (row, member) in enumerate(zip(rows, members, strict=True)):
            settled, length = member.settled, member.length
            start, end = len(settled.tokens), int(lengths[index])
            tokens[index, :, :start] = torch.tensor(settled.tokens, device=self.device)
            tokens[index, :, start:end] = self.written[row, :width, :length]
            position_ids[index, 0, :end] = [*settled.text_positions, *[settled.text_positions[-1]] * length]
            block = [step + 2 if self.in_blocks else 1 for step in range(length)]
            position_ids[index, 1, :end] = [*settled.block_positions, *block]
        context_length = torch.tensor([member.context_length for member in members], device=self.device)
        logits = self.model(  # [n W, T, V]; padding stands behind all that is read
            tokens.flatten(0, 1),
            position_ids=torch.from_numpy(position_ids).to(self.device).repeat_interleave(width, dim=0),
            context_length=context_length.repeat_interleave(width),
        )
        last = torch.from_numpy(lengths - 1).to(self.device).repeat_interleave(width)  # [n W]
        found: Tensor = logits[torch.arange(len(last), device=self.device), last]
        return found.unflatten(0, (len(rows), width))


@dataclass
class _Row:
    """What a prompt has read, and how far its answer is."""

    context_length: int = 0
    settled: Chunk = field(default_factory=lambda: Chunk([], [], []))
    length: int = 0  # tokens of the present answer
    live: bool = False  # whether an answer is being written
