"""Answers to blanks that are given instead of found: as ids, spelled as in their places, and with their scores."""

from __future__ import annotations

from collections.abc import Sequence

from ftk.errors import UserError, counted
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import Scored
from ftk.generation.search import Answer
from ftk.generation.text import check_text
from ftk.tasks.glm_blank.infill.framing import BlankFraming
from ftk.tokenizers.base import Tokenizer

Given = dict[int, list[int]]
"""Number of a blank -> the ids of its answer, in the order in which they are read."""


def encode_answers(tokenizer: Tokenizer, pieces: Sequence[str], answers: Sequence[str]) -> list[list[int]]:
    """The ids of an answer to each blank, spelled as behind the text before it: after a space, or right there.

    Args:
        pieces: the text before, between and behind the blanks.
        answers: one text per blank.

    Raises:
        UserError: there are more answers than blanks, or fewer; one text is given in place of a list.
    """
    if isinstance(answers, str):
        raise UserError(f"the answers of a prompt are a list of texts, one for each blank; write [{answers!r:.40}]")
    blanks = len(pieces) - 1
    if len(answers) != blanks:
        raise UserError(f"{len(answers)} answers for {counted(blanks, 'blank')}; give one for each")
    for answer in answers:
        check_text(answer, "an answer")
    return [_encoded(tokenizer, *pair) for pair in zip(pieces[:-1], answers, strict=True)]


def _encoded(tokenizer: Tokenizer, before: str, answer: str) -> list[int]:
    """The ids of an answer behind the text `before`."""
    text = answer.strip()
    if not text:
        return []
    if not before or before[-1].isspace() or answer[0].isspace():
        return tokenizer.encode(f" {text}" if before or answer[0].isspace() else text)
    left, joined = tokenizer.encode(before[-1]), tokenizer.encode(before[-1] + text)
    return joined[len(left) :] if joined[: len(left)] == left else tokenizer.encode(text)


def given_answers(
    framing: BlankFraming,
    request: Request,
    answers: Sequence[Sequence[int]],
    order: Sequence[int] | None = None,
    *,
    end: bool,
) -> Given:
    """Answers to all blanks of a request as they are read to be scored.

    Args:
        answers: ids for every blank, from left to right. Ids that finish with an end token are scored with it.
        order: in which blanks are filled, numbers from 0; left to right if None.
        end: whether the end-of-piece token is scored behind answers that have no end token.

    Raises:
        UserError: numbers of answers or an order that do not fit the blanks; what the positions do not reach.
    """
    count = len(request.prompt.places)
    order = range(count) if order is None else order
    if sorted(order) != list(range(count)):
        raise UserError(f"order {list(order)} is not one of all {count} blanks; name each of 0 to {count - 1}")
    if len(answers) != count:
        raise UserError(f"{len(answers)} answers for {count} blanks; give one for each")
    given = {number: list(map(int, answers[number])) for number in order}
    for answer in given.values():
        if end and not (answer and answer[-1] in framing.ends):
            answer.append(framing.ends[0])
    framing.branch(request, given)  # refuses what cannot be read
    return given


def scored_answers(framing: BlankFraming, given: Given, scored: Scored, length_penalty: float) -> list[Answer]:
    """Given answers from left to right, with their log-probabilities; their tokens are without the end token."""
    remaining, found = iter(scored.logprobs), {}
    for number, answer in given.items():
        own = [next(remaining) for _ in answer]
        words = answer[:-1] if answer and answer[-1] in framing.ends else answer
        found[number] = Answer(words, own, sum(own) / max(len(own), 1) ** length_penalty)
    return [found[number] for number in range(len(found))]
