"""Guided answers: tokens after which an answer could no longer match its guide are forbidden."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftk.batch import sent
from ftk.generation.processors.base import FORBIDDEN, LAST_RESORT, Processor, SearchState
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
        self._states: OrderedDict[tuple[int, bytes], Any] = OrderedDict()  # number and tokens of an answer -> state

    def __deepcopy__(self, memo: dict[int, Any]) -> GuidedAnswers:
        return self

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        num, width, size = scores.shape
        forbidden = np.zeros((num, width, size), dtype=np.bool_)
        guided = np.zeros((num, width, 1), dtype=np.bool_)
        for row in state.open_rows():
            number = state.numbers[row.prompt] if state.numbers else 0
            guide = self.guides.get(number, self.guides.get(-1))
            if guide is None:
                continue
            own = forbidden[row.prompt, row.hypothesis]
            own[:] = True
            now = self._state(guide, number, row.tokens)
            if now is None:  # a hypothesis that no search continues: its own tokens were forbidden
                continue
            guided[row.prompt, row.hypothesis] = True
            found = guide.allowed(now)
            np.logical_not(found, out=own[: len(found)])
        while len(self._states) > _REMEMBERED + num * width:
            self._states.popitem(last=False)
        mask = sent(torch.from_numpy(forbidden), scores.device)
        scores.masked_fill_(mask, FORBIDDEN)
        stuck = (scores.amax(-1, keepdim=True) == FORBIDDEN) & sent(torch.from_numpy(guided), scores.device)
        if not stuck.any():
            return scores
        return torch.where(stuck & ~mask, state.unprocessed.clamp(min=LAST_RESORT), scores)

    def _state(self, guide: Guide, number: int, tokens: list[int]) -> Any:
        """The guide's state behind the tokens; None where they do not match it."""
        key = number, np.array(tokens, dtype=np.int64).tobytes()
        if key in self._states:
            self._states.move_to_end(key)
            return self._states[key]
        before = (number, key[1][:-8])
        if not tokens:
            found = guide.start
        elif before in self._states:
            parent = self._states[before]
            found = None if parent is None else guide.after(parent, tokens[-1])
        else:
            found = guide.after(guide.start, *tokens)
        self._states[key] = found
        return found
