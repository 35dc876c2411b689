"""What filling blanks is about: a prompt as the model reads it, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftk.generation.processors.base import Processors


@dataclass(frozen=True)
class FilledBlank:
    """One blank of a text with its answer.

    Attributes:
        blank: how the blank is written, e.g. "[MASK]".
        text: the answer, without white space around it.
        tokens: its ids without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's stands last if it came.
        score: sum of token_logprobs / their number ** length_penalty, as the processors have changed them.
        others: further answers to the same blank, best first, given the best ones to the blanks before it; `nbest`
            - 1 at most.
        alternatives: for each of token_logprobs the likeliest tokens there with their log-probabilities, best first;
            empty unless `alternatives` asks for them.
        lm_logprobs: the same as token_logprobs under the language model; empty where there is none.
    """

    blank: str
    text: str
    tokens: list[int]
    token_logprobs: list[float]
    score: float
    others: tuple[FilledBlank, ...] = ()
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()
    lm_logprobs: Sequence[float] = ()

    @property
    def named(self) -> dict[str, str]:
        """What tells the answer from others to the same text, in records."""
        return {"blank": self.blank}

    @property
    def probability(self) -> float:
        """Probability of the whole answer, given the text and the answers before it."""
        return math.exp(self.logprob)

    @property
    def logprob(self) -> float:
        """Natural logarithm of `probability`."""
        return sum(self.token_logprobs)


@dataclass(frozen=True)
class FillResult:
    """A prompt, the text with its blanks filled, the answers from left to right, and where each stands in the text.

    With `nbest_over` "text" this is the best way to fill it, and there may be more:

    Attributes:
        score: of all answers together: the sum of the processed scores of their tokens / number of these **
            length_penalty.
        others: further ways, best first; `nbest` - 1 at most.
    """

    prompt: str
    text: str
    answers: list[FilledBlank]
    spans: tuple[tuple[int, int], ...] = ()
    score: float | None = None
    others: tuple[FillResult, ...] = ()


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the model reads it.

    Attributes:
        prompt: as given.
        pieces: the text before, between and behind the blanks: one more than there are blanks.
        context: token ids, [CLS] and end of text included.
        continued: whether it has no blank and is continued at its end, where one was put.
        seed: of its own, if its options give one.
        processors: of its own, if its options ask for any.
        order: in which blanks are answered that are to be scored, by their numbers; left to right if None.
        candidates: answers that are to be scored: of each candidate the ids of each blank.
        references: what stood in the blanks, if that is known: of samples, whose text is not; they have no `pieces`.
    """

    prompt: str
    pieces: list[str]
    context: list[int]
    seed: int | None = None
    processors: Processors | None = None
    continued: bool = False
    order: list[int] | None = None
    candidates: list[list[list[int]]] = field(default_factory=list)
    references: list[str] | None = None

    @property
    def remark(self) -> tuple[str, str] | None:
        """What may be wrong with the prompt, of one and of several."""
        if not self.continued:
            return None
        return "has no blank and is continued at the end", "have no blank and are continued at the end"
