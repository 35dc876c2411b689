"""Diverse beam search."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors
from ftk.generation.search.answer import Answer
from ftk.generation.search.base import Move, Search, SearchTask, ranked
from ftk.generation.search.beam import Beam
from ftk.registry import register_search


@register_search("diverse_beam")
class DiverseBeamSearch(Search):
    """Groups of beams, each kept away from the tokens of those before it (Vijayakumar et al. 2018).

    The W hypotheses are `diverse_groups` beam searches of equal width. At each step they choose one after the
    other, and a token's score is lessened by `diversity_strength` for each hypothesis of an earlier group that
    has just taken it (Hamming diversity). As in fairseq and transformers the score of a hypothesis keeps what was
    taken off. Each group has its own answers and stops by itself, and then takes nothing off others; at the end
    the answers of all are ranked together.
    """

    def __init__(
        self, config: GenerationConfig, task: SearchTask, processors: Processors | None = None, options: Any = None
    ) -> None:
        super().__init__(config, task, processors, options)
        self.group_width = config.beam // config.diverse_groups
        self.groups = [Beam(config, task, self.group_width) for _ in range(config.diverse_groups)]

    @staticmethod
    def width(config: GenerationConfig, options: Any = None) -> int:
        return config.beam

    def _advance(self, scores: Tensor, logprobs: Tensor) -> Move:
        counts = torch.zeros_like(scores[:, 0])  # [N, V]: how often a token was taken by the groups so far
        moves = []
        for number, group in enumerate(self.groups):
            first = number * self.group_width if self.step else 0  # at the first step all go on from the same place
            part = slice(first, first + self.group_width)
            lessened = scores[:, part] - self.config.diversity_strength * counts[:, None]
            # What is closed by this very step still keeps away: its tokens were chosen.
            open_groups = ~group.closed
            tokens, sources = group.step(group.best(group.totals(lessened)), logprobs[:, part])
            chosen = group.scores.isfinite() & open_groups[:, None]  # [N, group_width]
            counts = counts.scatter_add(1, tokens, chosen.to(counts.dtype))
            moves.append((tokens, sources + first))
        return Move(*(torch.cat(parts, dim=1) for parts in zip(*moves, strict=True)))

    def finished(self) -> Tensor:
        return torch.stack([group.closed for group in self.groups]).all(0)

    def answers(self) -> list[list[Answer]]:
        by_group = [group.answers() for group in self.groups]
        of_prompts = zip(*by_group, strict=True)
        return [ranked(list(chain.from_iterable(found)))[: self.config.nbest] for found in of_prompts]

    def tokens_so_far(self) -> Tensor:
        return torch.cat([group.tokens[:, :, : self.step] for group in self.groups], dim=1)

    def keep(self, rows: Tensor) -> None:
        self.keep_task(rows)
        for group in self.groups:
            group.keep(rows)
