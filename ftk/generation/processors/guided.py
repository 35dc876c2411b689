"""Guided answers: tokens after which an answer could no longer match its guide are forbidden."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftk.batch import sent
from ftk.generation.processors.base import FORBIDDEN, LAST_RESORT, Processor, SearchState, index_of
from ftk.generation.processors.guides import Guide

_REMEMBERED = 64  # states beyond those of the present step


class GuidedAnswers(Processor):
    """An answer matches its guide: it ends only where it does, and every token leaves a way to it.

    Where other processors have forbidden all that the guide allows, the guide counts. Asks the device for the tokens at
    every step. It keeps nothing about hypotheses but what their tokens alone say.

    Args:
        guides: number of the answer -> its guide; under -1 that of all answers that are not named.
    """

    def __init__(self, guides: Mapping[int, Guide]) -> None:
        self.guides = dict(guides)
        # Number and tokens of an answer -> the state behind them.
        self._states: OrderedDict[tuple[int, tuple[int, ...]], Any] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> GuidedAnswers:
        return self

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        num, width, size = scores.shape
        free, nothing = _equal_limits(-FORBIDDEN, size), _equal_limits(FORBIDDEN, size)
        rows = [free] * (num * width)  # the most that scores of each hypothesis may be
        for row in state.open_rows():
            number = state.numbers[row.prompt] if state.numbers else 0
            guide = self.guides.get(number, self.guides.get(-1))
            if guide is None:
                continue
            now = self._state(guide, number, tuple(row.tokens))
            # None: a hypothesis that no search continues; its own tokens were forbidden.
            rows[row.prompt * width + row.hypothesis] = nothing if now is None else guide.allowed(now, size)
        while len(self._states) > _REMEMBERED + num * width:
            self._states.popitem(last=False)
        # A minimum: filling by a mask takes a processor up to ten times as long, as it guesses wrong where tokens that
        # are allowed and forbidden alternate.
        limits = _stacked(rows, scores.device)  # [1 or N W, V]
        limits = limits.view(num, width, size) if len(limits) == len(rows) else limits[None]
        scores = torch.minimum(scores, limits, out=scores)
        stuck = scores.amax(-1, keepdim=True) == FORBIDDEN
        if not stuck.any():
            return scores
        guided = torch.tensor([guide is not free for guide in rows], device=scores.device).view(num, width, 1)
        return torch.where(stuck & guided & (limits > 0), state.unprocessed.clamp(min=LAST_RESORT), scores)

    def _state(self, guide: Guide, number: int, tokens: tuple[int, ...]) -> Any:
        """The guide's state behind the tokens; None where they do not match it."""
        key = number, tokens
        if key in self._states:
            self._states.move_to_end(key)
            return self._states[key]
        before = number, tokens[:-1]
        if not tokens:
            found = guide.start
        elif before in self._states:
            parent = self._states[before]
            found = None if parent is None else guide.after(parent, tokens[-1])
        else:
            found = guide.after(guide.start, *tokens)
        self._states[key] = found
        return found


@functools.lru_cache(4)
def _equal_limits(limit: float, size: int) -> Tensor:
    """float32 [V]"""
    return torch.full((size,), limit, dtype=torch.float32, device="cpu")


def _stacked(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Tensors [V] of the host on a device, [R, V] or, where all are the same one, [1, V]; each is sent once."""
    different = {id(mask): mask for mask in rows}
    found = sent(torch.stack([*different.values()]), device)
    if len(different) in (1, len(rows)):
        return found
    places = {key: place for place, key in enumerate(different)}
    return found[index_of([places[id(mask)] for mask in rows], device)]
