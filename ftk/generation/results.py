"""What generators of texts take and give: prompts as the model reads them, answers, texts, pieces of a stream."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from ftk.generation.engine.request import Request


@dataclass(frozen=True, repr=False)
class TextAnswer:
    """One answer in words; `str` is its text.

    Attributes:
        text: as it stands in the text; of an answer between two texts without white space at its ends, of a
            continuation with the space in front of it.
        tokens: its ids without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's stands last if it came.
        score: sum of the processed token_logprobs / their number ** length_penalty.
        others: further answers in the same place, best first, given the best ones before it; `nbest` - 1 at most.
        alternatives: for each of token_logprobs the likeliest tokens there with their log-probabilities, best first;
            empty unless `alternatives` asks for them.
        lm_logprobs: the same as token_logprobs under the language model; empty where there is none.
        named: what tells the answer from others to the same text, in records.
    """

    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    score: float
    others: tuple[TextAnswer, ...] = ()
    alternatives: Sequence[Any] = ()
    lm_logprobs: Sequence[float] = ()
    named: Mapping[str, str] = field(default_factory=dict)

    @property
    def probability(self) -> float:
        """Probability of the whole answer, given the text and the answers before it."""
        return math.exp(self.logprob)

    @property
    def logprob(self) -> float:
        """Natural logarithm of `probability`."""
        return sum(self.token_logprobs)

    @property
    def token_probability(self) -> float:
        """The geometric mean of its tokens' probabilities: what answers of any length are compared by."""
        return math.exp(self.logprob / max(1, len(self.token_logprobs)))

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, p={self.probability:.3g})"

    def _repr_html_(self) -> str:
        return self._marked(self.text)

    def _marked(self, words: str) -> str:
        """Words of the answer as HTML, from red to green with the probability of its tokens."""
        # A background that lets the page's own shine through is readable on light and dark pages.
        color = f"hsla({120 * self.token_probability:.0f}, 90%, 45%, 0.35)"
        each = " ".join(f"{math.exp(logprob):.3f}" for logprob in self.token_logprobs)
        title = html.escape(f"p = {self.probability:.3g} (each token: {each})")
        return f'<span style="background: {color}" title="{title}">{html.escape(words)}</span>'


@dataclass(frozen=True, repr=False)
class TextResult:
    """A prompt, the text with its answers, these from left to right, and the place of each in the text.

    `str` is the text; a notebook shows it with each answer in the colour of its probability.

    Attributes:
        score: of all answers together, where the n best ways to answer the prompt as a whole were asked for: the sum of
            the processed scores of their tokens / number of these ** length_penalty.
        others: further ways, best first; `nbest` - 1 at most.
        num_cached: of a service: tokens of the prompt that were not read, as an earlier one began with them.
    """

    prompt: str
    text: str
    answers: Sequence[TextAnswer]
    spans: tuple[tuple[int, int], ...] = ()
    score: float | None = None
    others: tuple[TextResult, ...] = ()
    num_cached: int = 0

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.text!r}, answers={list(self.answers)!r})"

    def _repr_html_(self) -> str:
        text, at = "", 0
        for (start, end), answer in zip(self.spans, self.answers, strict=False):  # of a sample no places are known
            text += html.escape(self.text[at:start]) + answer._marked(self.text[start:end])
            at = end
        return f'<div style="white-space: pre-wrap">{text}{html.escape(self.text[at:])}</div>'


class Span(NamedTuple):
    """Where a part of an answer stands in a text, and the number of the answer."""

    start: int
    end: int
    number: int


@dataclass(frozen=True)
class TextPiece:
    """New text of one answer, with the tokens that it consists of.

    All pieces of an answer, joined, have its text, tokens and log-probabilities; the `filled` of all pieces of a prompt
    are its text with the answers.

    Attributes:
        prompt: number of the prompt, from 0 on.
        number: of the answer, from 0 on, from left to right.
        text: the next part of the answer's text; "" only in a last piece.
        tokens: ids, without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's comes with the last piece.
        filled: the next part of the text with its answers, as far as it is known from its beginning on.
        filled_spans: where parts of answers stand in `filled`: of this one or, where answers are not found from left to
            right, of others.
        answer: the complete answer, with its last piece.
        result: the complete result, with the last piece of a prompt.
        alternatives: for each of token_logprobs the likeliest tokens there, if `alternatives` asks for them.
    """

    prompt: int
    number: int
    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    filled: str = ""
    filled_spans: tuple[Span, ...] = ()
    answer: TextAnswer | None = None
    result: TextResult | None = None
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()


@dataclass(frozen=True)
class EncodedText:
    """A prompt as the model reads it.

    Attributes:
        request: to the engine.
        candidates: given answers that are scored, as `Framing.branch` understands them.
        references: the right answers, if they are known.
        remark: what may be wrong with the prompt, of one prompt and of several.
        is_message: whether it is the last one of a conversation: the text of its result is that of the answer.
        options: the prompt's own, from which another process encodes the same prompt.
        ids: of the prompt, where it was given so.
    """

    prompt: str
    request: Request
    candidates: Sequence[Any] = ()
    references: Sequence[str] | None = None
    remark: tuple[str, str] | None = None
    is_message: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    ids: Sequence[int] | None = None
