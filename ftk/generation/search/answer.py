"""What a search gives: answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Alternatives = tuple[tuple[tuple[int, float], ...], ...]
"""For each token of an answer, its end token too, the likeliest tokens with their log-probabilities, best first."""


@dataclass(frozen=True)
class Answer:
    """One answer of a prompt.

    Attributes:
        tokens: ids without the end token.
        token_logprobs: natural logarithm of each token's probability under the model, untouched by processors,
            temperature and filters; the end token's stands last if it came.
        score: what ranks answers: the sum of the processed scores (without processors: of token_logprobs) /
            number of tokens ** length_penalty, the end token counted.
        others: further answers in its place, best first; `nbest` - 1 at most. They have no others.
        alternatives: for each of token_logprobs the likeliest tokens there, if they were asked for.
        lm_logprobs: the same as token_logprobs under the language model, where there is one.
        end: the token that ended it, if one did and the strategy says which.
        num_scored: tokens that `score` counts, where a stop string has cut some of them off; else 0.
    """

    tokens: list[int]
    token_logprobs: list[float]
    score: float
    others: tuple[Answer, ...] = ()
    alternatives: Alternatives = ()
    lm_logprobs: Sequence[float] = ()
    end: int | None = None
    num_scored: int = 0

    @property
    def ended(self) -> bool:
        """Whether the end token came, that is, the answer was not cut at the greatest length."""
        return len(self.token_logprobs) > len(self.tokens)
