"""The likeliest tokens of the model at each place of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from ftk.generation.search.answer import Alternatives, Answer
from ftk.generation.search.ranking import stable_topk


class _Step(NamedTuple):
    tokens: Tensor  # int64 [N, W, step]: what was written before
    ids: Tensor  # int64 [N, W, K]
    logprobs: Tensor  # float32 [N, W, K]


class LikeliestTokens:
    """The likeliest next tokens after every hypothesis of a search, looked up by what the hypothesis has written.

    Equal beginnings of answers have equal continuations, however a strategy moves hypotheses.

    Args:
        count: K, tokens a place.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._steps: list[_Step] = []

    def add(self, tokens: Tensor, logprobs: Tensor) -> None:
        """One more step: hypotheses [N, W, step], the model's own log-probabilities [N, W, V] of their next tokens."""
        if self.count:
            values, ids = stable_topk(logprobs, min(self.count, logprobs.size(-1)))
            self._steps.append(_Step(tokens.clone(), ids, values))

    def keep(self, rows: Tensor) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order."""
        self._steps = [_Step(*(part[rows] for part in step)) for step in self._steps]

    def behind(self, written: Sequence[int], place: int) -> Alternatives:
        """Those of one token, behind these of the prompt at `place`; none where they were not asked for."""
        if not self.count:
            return ()
        tokens, ids, logprobs = (part[place] for part in self._steps[len(written)])
        row = tokens.tolist().index([*written])
        return (tuple(zip(ids[row].tolist(), logprobs[row].tolist(), strict=True)),)

    def given_to(self, answers: Sequence[Answer], place: int) -> list[Answer]:
        """The answers of the prompt at `place` with their alternatives; moves them to the host."""
        if not self.count:
            return list(answers)
        found: dict[tuple[int, ...], tuple[tuple[int, float], ...]] = {}
        for step in self._steps:
            lines = (part[place].tolist() for part in step)
            for tokens, ids, logprobs in zip(*lines, strict=True):
                found.setdefault(tuple(tokens), tuple(zip(ids, logprobs, strict=True)))
        return [
            replace(answer, alternatives=tuple(found[tuple(answer.tokens[:step])] for step in range(num_steps)))
            for answer, num_steps in ((answer, len(answer.token_logprobs)) for answer in answers)
        ]
