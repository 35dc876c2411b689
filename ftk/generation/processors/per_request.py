"""Processors of each request's own, for requests that are answered by one search."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ftk.generation.processors.base import Processors, SearchState, index_of
from ftk.generation.search.ranking import stable_topk


class PerRequest(Processors):
    """The requests of one search, each with processors of its own; those that share theirs are processed together.

    Where a processor raises, the scores of its request are left as they were, and `failed` keeps the error.

    Args:
        own: for each request its processors. They are copied where they keep something about hypotheses.

    Attributes:
        failed: number of a request in this search -> what one of its processors raised.
    """

    def __init__(self, own: Sequence[Processors]) -> None:
        super().__init__()
        self.own = [copy.deepcopy(one) if one.keeps_state else one for one in own]
        self.failed: dict[int, Exception] = {}
        self._known_shares: list[_Share] | None = None  # made when they are first asked for

    def __bool__(self) -> bool:
        return any(map(bool, self.own))

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        shares = self._shares(scores.device)
        if len(shares) == 1:
            return self._processed(shares[0], state, scores)
        for share in shares:
            if share.processors:
                part = state.of_prompts(share.rows, share.row_index)
                scores[share.row_index] = self._processed(share, part, scores[share.row_index])
        return scores

    def reorder(self, sources: Tensor) -> None:
        for processors, _, index in self._shares(sources.device):
            if processors.keeps_state:
                processors.reorder(sources[index])

    def keep(self, rows: Tensor) -> None:
        stay = rows.tolist()
        for processors, own, _ in self._shares(rows.device):
            left = [own.index(row) for row in stay if row in own]
            if left and processors.keeps_state:
                processors.keep(index_of(left, rows.device))
        self.own = [self.own[row] for row in stay]
        self.failed = {stay.index(row): error for row, error in self.failed.items() if row in stay}
        self._known_shares = None

    def select(self, totals: Tensor, width: int, count: int) -> list[list[int]] | None:
        shares = self._shares(totals.device)
        if len(shares) == 1 and not self.failed:
            return shares[0].processors.select(totals, width, count)
        chosen: dict[int, list[int]] = {}
        for processors, rows, _ in shares:
            sound = [row for row in rows if row not in self.failed]
            found = processors.select(totals[index_of(sound, totals.device)], width, count) if sound else None
            if found is not None:
                chosen.update(zip(sound, found, strict=True))
        if not chosen:
            return None
        _, best = stable_topk(totals.flatten(1), min(count, totals[0].numel()))
        usual = best.tolist()
        return [chosen.get(row, usual[row]) for row in range(len(self.own))]

    def _processed(self, share: _Share, state: SearchState, scores: Tensor) -> Tensor:
        """The scores of a share's requests, whose state and scores these are."""
        try:
            return share.processors(state, scores)
        except Exception:  # of a processor that is not ftk's: its request fails alone, below
            self.failed |= self._broken(share, state)
        scores = state.fresh_scores()  # what was changed in place begins anew
        sound = [place for place, row in enumerate(share.rows) if row not in self.failed]
        if sound:
            index = index_of(sound, scores.device)
            scores[index] = share.processors(state.of_prompts(sound, index), scores[index])
        return scores

    def _broken(self, share: _Share, state: SearchState) -> dict[int, Exception]:
        """Those of a share's requests whose processors raise, each tried alone."""
        broken = {}
        for place, row in enumerate(share.rows):
            index = index_of([place], state.logprobs.device)
            alone = state.of_prompts([place], index)
            try:
                share.processors(alone, alone.fresh_scores())
            except Exception as error:
                broken[row] = error
        return broken

    def _shares(self, device: torch.device) -> list[_Share]:
        """The different processors, each with its requests."""
        if self._known_shares is None:
            rows: dict[int, list[int]] = {}
            for row, one in enumerate(self.own):
                rows.setdefault(id(one), []).append(row)
            self._known_shares = [_Share(self.own[own[0]], own, index_of(own, device)) for own in rows.values()]
        return self._known_shares


class _Share(NamedTuple):
    processors: Processors
    rows: list[int]  # numbers of its requests
    row_index: Tensor  # the same, int64 [R]
