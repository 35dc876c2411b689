"""Processors of each request's own, for requests that are answered by one search."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.processors.base import Processors, SearchState, index_of
from ftk.generation.search.ranking import stable_topk


class PerRequest(Processors):
    """The requests of one search, each with processors of its own; those that share theirs are processed together.

    Of processors that read answers together those that are as long, and have the same limits.

    Where a processor raises, or gives scores of another shape, those of its request are left as they were, and `failed`
    keeps the error.

    Args:
        own: for each request its processors. They are copied where they keep something about hypotheses.

    Attributes:
        spans: for each request its answer's place in the search; None where none has joined it.
        failed: number of a request in this search -> what one of its processors raised.
    """

    def __init__(self, own: Sequence[Processors]) -> None:
        super().__init__()
        self.own = [copy.deepcopy(processors) if processors.keeps_state else processors for processors in own]
        self.spans: list[Hashable] = [None] * len(self.own)
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
        for processors, rows, index in self._shares(sources.device):
            if processors.keeps_state:
                try:
                    processors.reorder(sources[index])
                except Exception as error:  # of a processor that is not ftk's, here and below
                    self._fail(rows, error)

    def join(self, others: PerRequest) -> None:
        """Adds further requests."""
        self.failed |= {len(self.own) + row: error for row, error in others.failed.items()}
        self.own += others.own
        self.spans += others.spans
        self._known_shares = None

    def keep_requests(self, stay: Sequence[int], device: torch.device) -> None:
        """`keep`, given on the host: of the requests only those with these numbers stay, in this order."""
        for processors, own, _ in self._shares(device):
            left = [own.index(row) for row in stay if row in own]
            if left and processors.keeps_state:
                try:
                    processors.keep(index_of(left, device))
                except Exception as error:
                    self._fail([own[place] for place in left], error)
        self.own = [self.own[row] for row in stay]
        self.spans = [self.spans[row] for row in stay]
        self.failed = {stay.index(row): error for row, error in self.failed.items() if row in stay}
        self._known_shares = None

    def select(self, totals: Tensor, width: int, count: int) -> list[list[int]] | None:
        chosen: dict[int, list[int]] = {}
        for processors, rows, _ in self._shares(totals.device):
            sound = [row for row in rows if row not in self.failed]
            if sound:
                chosen |= self._selected(processors, sound, totals, width, count)
        if not chosen:
            return None
        if len(chosen) == len(self.own):
            return [chosen[row] for row in range(len(self.own))]
        _, best = stable_topk(totals.flatten(1), min(count, totals[0].numel()))
        usual = best.tolist()
        return [chosen.get(row, usual[row]) for row in range(len(self.own))]

    def _processed(self, share: _Share, state: SearchState, scores: Tensor) -> Tensor:
        """The scores of a share's requests, whose state and scores these are; if they fail together, each alone."""
        try:
            return _checked(share.processors, state, scores)
        except Exception as error:
            if len(share.rows) == 1:
                self._fail(share.rows, error)
                return state.fresh_scores()
        scores = state.fresh_scores()  # the failed processors may have changed theirs in place
        for place, row in enumerate(share.rows):
            index = index_of([place], scores.device)
            alone = state.of_prompts([place], index)
            scores[index] = self._processed(_Share(share.processors, [row], index), alone, alone.fresh_scores())
        return scores

    def _selected(
        self, processors: Processors, rows: list[int], totals: Tensor, width: int, count: int
    ) -> dict[int, list[int]]:
        """What processors select for these requests; nothing for those that fail, or where they have no opinion."""
        try:
            own = totals if len(rows) == len(totals) else totals[index_of(rows, totals.device)]
            found = processors.select(own, width, count)
            return {} if found is None else dict(zip(rows, found, strict=True))
        except Exception as error:
            if len(rows) == 1:
                self._fail(rows, error)
                return {}
        alone = (self._selected(processors, [row], totals, width, count) for row in rows)
        return {row: selected for own in alone for row, selected in own.items()}

    def _fail(self, rows: Sequence[int], error: Exception) -> None:
        """These requests have failed; of several errors the first counts."""
        self.failed = dict.fromkeys(rows, error) | self.failed

    def _shares(self, device: torch.device) -> list[_Share]:
        """The different processors, each with its requests."""
        if self._known_shares is None:
            rows: dict[Hashable, list[int]] = {}
            for row, (processors, span) in enumerate(zip(self.own, self.spans, strict=True)):
                rows.setdefault((id(processors), span if processors.reads_answers else None), []).append(row)
            self._known_shares = [_Share(self.own[own[0]], own, index_of(own, device)) for own in rows.values()]
        return self._known_shares


def _checked(processors: Processors, state: SearchState, scores: Tensor) -> Tensor:
    """What processors make of scores [N, W, V], if it is of the same kind."""
    found = processors(state, scores)
    if found.shape != scores.shape or found.dtype != scores.dtype:
        raise UserError(
            f"a processor made scores {list(found.shape)} of {found.dtype} of {list(scores.shape)} of {scores.dtype}; "
            "it must keep shape and type"
        )
    return found


class _Share(NamedTuple):
    processors: Processors
    rows: list[int]  # numbers of its requests
    row_index: Tensor  # the same, int64 [R]
