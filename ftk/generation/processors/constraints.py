"""Lexical constraints: phrases that an answer must hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from ftk.generation.processors.base import FORBIDDEN, Processor, SearchState, index_of, keep_only
from ftk.generation.processors.length import of_answer
from ftk.generation.processors.progress import Progress
from ftk.generation.search.ranking import stable_topk


class LexicalConstraints(Processor):
    """An answer ends only when it holds its phrases, and they always come while there is room for them.

    By itself it works with every search: it forbids the end, and when there is just room for what is lacking it
    allows nothing else, so that a greedy answer has the phrases where they could not wait any longer. Beam search
    also asks `select`, and divides the beam among hypotheses that hold differently many of the tokens (Post & Vilar
    2018, dynamic beam allocation), so that the phrases come where they fit best.

    Args:
        progress: number of the answer -> its phrases; under -1 those of all answers that are not named.
        max_lens: greatest lengths of the first answer, the second, ..., where they are below max_len.
    """

    def __init__(self, progress: Mapping[int, Progress], max_lens: Sequence[int] = ()) -> None:
        self.progress = dict(progress)
        self.max_lens = tuple(max_lens)
        self._states: dict[tuple[int, tuple[int, ...]], Any] = {}  # of the answers of the last step
        self._now: list[list[Any]] = []  # [N][W] states of the present step; None: no phrases
        self._numbers: list[int] = []
        self._ends: tuple[int, ...] = ()

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        self._follow(state)
        for row in state.open_rows():
            number = state.numbers[row.prompt]
            progress, now = self._progress(number), self._now[row.prompt][row.hypothesis]
            if progress is None or progress.need(now) == 0:
                continue
            scores[row.prompt, row.hypothesis, state.end_index] = FORBIDDEN
            room = of_answer(self.max_lens, number, state.max_len) - state.step - 1  # behind the next token
            if progress.need(progress.forget(now)) <= room:
                continue
            tokens = [token for token in progress.tokens if progress.need(progress.advance(now, token)) <= room]
            if tokens:
                keep_only(state, scores, row, tokens)
        return scores

    def select(self, totals: Tensor, width: int, count: int) -> list[list[int]] | None:
        """Candidates by banks: those that lack equally many tokens are a bank, and each in turn gives its best.

        To choose from are the best candidates of all, the best of each hypothesis, and every token that brings a
        phrase on (Post & Vilar 2018, 3).
        """
        if all(self._progress(number) is None for number in self._numbers):
            return None
        size = totals.size(-1)
        best = stable_topk(totals.flatten(1), min(count, totals[0].numel()))[1].tolist()  # [N, C]
        of_each = totals.argmax(-1).tolist()  # [N, W]
        chosen: list[list[int]] = []
        for prompt, number in enumerate(self._numbers):
            progress = self._progress(number)
            pool = set(best[prompt])
            if progress is None:
                chosen.append(_by_score(totals[prompt].flatten(), pool)[1])
                continue
            now = self._now[prompt]
            for hypothesis, at in enumerate(now):
                pool.add(hypothesis * size + of_each[prompt][hypothesis])
                need = progress.need(at)
                pool.update(
                    hypothesis * size + token
                    for token in progress.tokens
                    if progress.need(progress.advance(at, token)) < need
                )
            scores, order = _by_score(totals[prompt].flatten(), pool)
            banks: dict[int, list[int]] = {}
            for score, index in zip(scores, order, strict=True):
                if score > FORBIDDEN:
                    after = progress.advance(now[index // size], index % size)
                    banks.setdefault(progress.need(after), []).append(index)
            chosen.append(self._in_turn([banks[need] for need in sorted(banks)], size, width))
        return chosen

    def _in_turn(self, banks: list[list[int]], size: int, width: int) -> list[int]:
        """Candidates from each bank in turn, the most complete first, until `width` do not end."""
        chosen: list[int] = []
        going_on = 0
        for index in _round_robin(banks):
            if going_on == width:
                break
            chosen.append(index)
            going_on += index % size not in self._ends
        return chosen

    def _progress(self, number: int) -> Progress | None:
        return self.progress.get(number, self.progress.get(-1))

    def _follow(self, state: SearchState) -> None:
        """Finds the state of each hypothesis, from that of the answer that it continues."""
        self._numbers, self._ends = list(state.numbers), state.ends
        before, self._states, self._now = self._states, {}, []
        for number, hypotheses in zip(self._numbers, state.host_tokens.tolist(), strict=True):
            progress = self._progress(number)
            if progress is None:
                self._now.append([None] * len(hypotheses))
                continue
            states = []
            for tokens in map(tuple, hypotheses):
                parent = before.get((number, tokens[:-1])) if tokens else None
                now = progress.after(tokens) if parent is None else progress.advance(parent, tokens[-1])
                self._states[number, tokens] = now
                states.append(now)
            self._now.append(states)


def _by_score(scores: Tensor, pool: set[int]) -> tuple[list[float], list[int]]:
    """The values of `scores` [W V] at `pool`, greatest first, equal ones in order, and where they are."""
    indices = index_of(sorted(pool), scores.device)
    values, order = scores[indices].sort(descending=True, stable=True)
    return values.tolist(), indices[order].tolist()


def _round_robin(banks: Sequence[Sequence[int]]) -> Iterator[int]:
    for place in range(max(map(len, banks), default=0)):
        for bank in banks:
            if place < len(bank):
                yield bank[place]
