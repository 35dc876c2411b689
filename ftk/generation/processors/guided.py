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
# The most that a byte of bits leaves of 8 scores, float32 [256, 8]: filling by a mask takes a processor up to ten times
# as long, as it guesses wrong where tokens that are allowed and forbidden alternate.
_LIMITS = torch.from_numpy(
    np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), np.inf, FORBIDDEN)
).float()


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
        allowed = np.full((num, width, -(-size // 8)), 255, dtype=np.uint8)  # a bit for each token
        guided = np.zeros((num, width, 1), dtype=np.bool_)
        for row in state.open_rows():
            number = state.numbers[row.prompt] if state.numbers else 0
            guide = self.guides.get(number, self.guides.get(-1))
            if guide is None:
                continue
            own = allowed[row.prompt, row.hypothesis]
            own[:] = 0
            now = self._state(guide, number, tuple(row.tokens))
            if now is None:  # a hypothesis that no search continues: its own tokens were forbidden
                continue
            guided[row.prompt, row.hypothesis] = True
            found = guide.allowed(now)
            own[: len(found)] = found[: len(own)]
        while len(self._states) > _REMEMBERED + num * width:
            self._states.popitem(last=False)
        bits = sent(torch.from_numpy(allowed), scores.device).int()
        limits = torch.nn.functional.embedding(bits, sent(_LIMITS, scores.device)).flatten(2)[..., :size]  # [N, W, V]
        scores = torch.minimum(scores, limits, out=scores)
        stuck = (scores.amax(-1, keepdim=True) == FORBIDDEN) & sent(torch.from_numpy(guided), scores.device)
        if not stuck.any():
            return scores
        return torch.where(stuck & (limits > 0), state.unprocessed.clamp(min=LAST_RESORT), scores)

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
