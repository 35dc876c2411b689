"""Log-probabilities of texts behind their contexts, for models of every family and in both directions of reading."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ftk.config.options import option
from ftk.generation.engine.request import EXPECTED, TEXT, Request

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing
    from ftk.generation.engine.scoring import Scored
    from ftk.generation.text import TextGenerator
    from ftk.tokenizers.base import Tokenizer

CONTEXTS_AT_ONCE = 1024
"""Contexts that are sorted by length together, and held in memory as the model reads them."""

DEFAULT_WINDOW = 1023
"""Tokens of a window of text where a model reads any number: as many as Du et al. (2022) take."""


@dataclass(kw_only=True)
class Reading:
    """How a model reads a context.

    A causal model reads it the same way whatever is chosen here.
    """

    unidirectional: bool = option(
        False,
        "the model reads all of a context but its first token from left to right, as the beginning of its "
        "answer, instead of in both directions",
    )
    expected: str = option(TEXT, "what a model with several masks is asked for", choices=EXPECTED)


class Query(NamedTuple):
    """Token ids whose log-probabilities are wanted.

    Attributes:
        context: what comes before them, without tokens that begin a text.
        answers: any number, each by itself behind the context; none is empty.
        prompt: as of `Framing.ask`, in place of a context.
    """

    context: Sequence[int]
    answers: Sequence[Sequence[int]]
    prompt: Any = None


def log_likelihoods(
    generator: TextGenerator[Any],
    asked: Sequence[Query],
    reading: Reading,
    *,
    closed: bool | None = None,
    kept: int = 1,
    progress: Callable[[int], object] | None = None,
) -> list[list[Scored]]:
    """The log-probability of each token of each answer; no end token is scored.

    Args:
        generator: the model, and how it is asked.
        asked: contexts with their answers.
        reading: in which direction.
        closed: as of `Framing.ask`.
        kept: tokens of a context that stay in front where the rest is read from left to right.
        progress: called with the number of contexts that are done since the last call.

    Raises:
        UserError: the model's positions do not reach; a log-probability is NaN or infinite.
    """
    from ftk.generation.engine.scoring import Scored, score

    framing: Framing = generator.framing
    found: list[list[Scored]] = []
    for first in range(0, len(asked), CONTEXTS_AT_ONCE):
        requests, given, read_before = [], [], []
        for context, answers, prompt in asked[first : first + CONTEXTS_AT_ONCE]:
            here = min(kept, len(context)) if reading.unidirectional else len(context)
            asked_by = framing.ask(context[:here], (), reading.expected, closed) if prompt is None else prompt
            requests.append(Request(asked_by))
            given.append([framing.continuation([*context[here:], *answer]) for answer in answers])
            read_before.append(len(context) - here)
        scored = score(generator.model, framing, requests, given, progress)
        for own, start in zip(scored, read_before, strict=True):
            found.append([Scored(scores[0][start:], scores[1][start:], scores[2][start:]) for scores in own])
    return found


def encode_pair(tokenizer: Tokenizer, context: str, answer: str, *, apart: bool) -> tuple[list[int], list[int]]:
    """A context and what follows it as ids, by the rule of lm-evaluation-harness.

    White space at the end of the context moves to the answer. Both are encoded as one text, of which the answer has
    what goes beyond the ids of the context alone, so that ids are those of other programs.

    Args:
        apart: encode each by itself, as for models that read them at two places.

    Returns:
        ids of both; where the answer joins the context's last token, the answer has that token.
    """
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, answer = context[:-spaces], context[-spaces:] + answer
    before = tokenizer.encode(context)
    if apart:
        return before, tokenizer.encode(answer)
    whole = tokenizer.encode(context + answer)
    cut = min(len(before), len(whole) - 1)
    return whole[:cut] if cut < len(before) else before, whole[cut:]


def fitted(
    framing: Any, context: Sequence[int], answer: int, expected: str = TEXT, closed: bool | None = None
) -> Sequence[int]:
    """A context without the tokens at its left for which a model has no positions.

    Context, answer and what stands around them count as one text, as in the evaluation of Du et al. (2022).

    Args:
        context: ids.
        answer: tokens of the longest answer.
        expected, closed: as of `Framing.ask`.
    """
    limit: int | None = getattr(framing, "max_positions", None)
    if limit is None:
        return context
    too_many = len(context) + answer + num_read(framing, [], expected, closed) - limit
    return context[max(too_many, 0) :]


def num_read(framing: Any, context: Sequence[int], expected: str, closed: bool | None) -> int:
    """Tokens that a model reads of a context, and of what stands around it."""
    frame = framing.first(Request(framing.ask(context, (), expected, closed)))
    return len(frame.tokens) + len(frame.source)
