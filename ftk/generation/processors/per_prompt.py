"""Processors of each prompt's own, for prompts that are answered together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ftk.generation.processors.base import Processors, SearchState, index_of
from ftk.generation.ranking import stable_topk


class PerPrompt(Processors):
    """The prompts of one search, each with processors of its own; those that share theirs are processed together.

    Args:
        own: for each prompt its processors. They are copied where they keep something about hypotheses.
    """

    def __init__(self, own: Sequence[Processors]) -> None:
        super().__init__()
        copies = {id(one): copy.deepcopy(one) if one.keeps_state else one for one in own}
        self.own = [copies[id(one)] for one in own]
        self._known_shares: list[_Share] | None = None  # made when they are first asked for

    def __bool__(self) -> bool:
        return any(map(bool, self.own))

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        for processors, rows, index in self._shares(scores.device):
            if processors:
                scores[index] = processors(state.of_prompts(rows, index), scores[index])
        return scores

    def reorder(self, sources: Tensor) -> None:
        for processors, _, index in self._shares(sources.device):
            processors.reorder(sources[index])

    def keep(self, rows: Tensor) -> None:
        stay = rows.tolist()
        for processors, own, _ in self._shares(rows.device):
            left = [own.index(row) for row in stay if row in own]
            if left:
                processors.keep(index_of(left, rows.device))
        self.own = [self.own[row] for row in stay]
        self._known_shares = None

    def select(self, totals: Tensor, width: int, count: int) -> list[list[int]] | None:
        chosen: dict[int, list[int]] = {}
        for processors, rows, index in self._shares(totals.device):
            found = processors.select(totals[index], width, count)
            if found is not None:
                chosen.update(zip(rows, found, strict=True))
        if not chosen:
            return None
        _, best = stable_topk(totals.flatten(1), min(count, totals[0].numel()))
        usual = best.tolist()
        return [chosen.get(row, usual[row]) for row in range(len(self.own))]

    def _shares(self, device: torch.device) -> list[_Share]:
        """The different processors, each with its prompts."""
        if self._known_shares is None:
            rows: dict[int, list[int]] = {}
            for row, one in enumerate(self.own):
                rows.setdefault(id(one), []).append(row)
            self._known_shares = [_Share(self.own[own[0]], own, index_of(own, device)) for own in rows.values()]
        return self._known_shares


class _Share(NamedTuple):
    processors: Processors
    rows: list[int]  # numbers of its prompts
    row_index: Tensor  # the same, int64 [R]
