"""Tokens of a batch as they are written, before the answers that they belong to are complete."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftk.generation.search import not_finite

if TYPE_CHECKING:
    from ftk.generation.in_flight import Prompt
    from ftk.generation.search import Answer, Search


class NewTokens(NamedTuple):
    """A part of the answer to one blank. All parts of a blank, joined, are its answer.

    Attributes:
        prompt: number of the context, from 0 on, as they were given.
        blank: number of the blank, from 0 on, from left to right.
        tokens: ids, without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's comes with the last part.
        answer: the complete answer, with the last part. Where a stop string cuts it, tokens that came before it
            was seen may be missing in it.
    """

    prompt: int
    blank: int
    tokens: list[int]
    token_logprobs: list[float]
    answer: Answer | None


def told_at_once(answers: Sequence[Sequence[Answer]]) -> Generator[NewTokens, None, None]:
    """Answers that are all complete, those of each context from left to right, as parts of a stream."""
    for prompt, own in enumerate(answers):
        for blank, answer in enumerate(own):
            yield NewTokens(prompt, blank, answer.tokens, answer.token_logprobs, answer)


@dataclass
class _Told:
    """How much of an answer was told, and whether its end token has come."""

    count: int = 0
    ended: bool = False


class TokenStream:
    """Keeps what is written until somebody takes it. Each step costs a wait for the device, which has the tokens.

    Args:
        ends: tokens that end an answer; they are not told.
    """

    def __init__(self, ends: Sequence[int]) -> None:
        self._ends = frozenset(ends)
        self._told: dict[Prompt, _Told] = {}
        self._parts: list[NewTokens] = []

    def step(self, prompts: Sequence[Prompt], search: Search) -> None:
        """The search of these prompts has taken a step. Where hypotheses compete nothing is settled by it."""
        newest = search.newest()  # [2, N]
        if newest is None:
            return
        for prompt, token, logprob in zip(prompts, *newest.tolist(), strict=True):
            told = self._told.setdefault(prompt, _Told())
            told.ended = told.ended or token in self._ends  # a row that has ended goes on with anything
            if not math.isfinite(logprob):
                raise not_finite()
            if not told.ended:
                told.count += 1
                self._parts.append(NewTokens(prompt.index, prompt.number, [int(token)], [logprob], None))

    def answered(self, prompt: Prompt, number: int, answer: Answer) -> None:
        """Blank `number` of a prompt has its answer."""
        told = self._told.pop(prompt, _Told()).count
        rest = answer.tokens[told:], answer.token_logprobs[told:]
        self._parts.append(NewTokens(prompt.index, number, *rest, answer))

    def take(self) -> list[NewTokens]:
        """What came since the last call, in the order in which it came."""
        parts, self._parts = self._parts, []
        return parts
