"""Shortest and longest answers, for each answer of its own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ftk.generation.processors.base import FORBIDDEN, Processor, SearchState, end_only, index_of


def of_answer(values: Sequence[int], number: int, default: int) -> int:
    """The value for an answer, counted from 0; `default` for one behind the list's end."""
    return values[number] if number < len(values) else default


class MinLength(Processor):
    """No end token before an answer has its `min_lens` tokens.

    Args:
        min_lens: of the first answer, the second, ...
        default: of the answers behind them.
    """

    def __init__(self, min_lens: Sequence[int], default: int = 0) -> None:
        self.min_lens = tuple(min_lens)
        self.default = default

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        short = [row for row, b in enumerate(state.numbers) if state.step < of_answer(self.min_lens, b, self.default)]
        if short:
            rows = index_of(short, scores.device)
            scores[rows[:, None], :, state.end_index] = FORBIDDEN
        return scores


class MaxLength(Processor):
    """After its `max_lens` tokens only an end token, which keeps its own score (as in fairseq).

    Args:
        max_lens: of the first answer, the second, ...; the search's own max_len cuts those behind them.
    """

    def __init__(self, max_lens: Sequence[int]) -> None:
        self.max_lens = tuple(max_lens)

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        full = [row for row, b in enumerate(state.numbers) if state.step >= of_answer(self.max_lens, b, state.max_len)]
        if full:
            rows = index_of(full, scores.device)
            scores[rows] = end_only(state)[rows]
        return scores
