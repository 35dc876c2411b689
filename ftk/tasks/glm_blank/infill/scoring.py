"""Scores answers to blanks that are given instead of found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ftk.errors import UserError
from ftk.generation.engine.request import Request
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.search import Answer
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.tasks.glm_blank.infill.framing import BlankFraming

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.generator import BlankGenerator

Given = dict[int, list[int]]
"""Number of a blank -> the ids of its answer, in the order in which they are read."""


def score_ids(
    generator: BlankGenerator,
    contexts: Sequence[Sequence[int]],
    candidates: Sequence[Sequence[Sequence[Sequence[int]]]],
    orders: Sequence[Sequence[int] | None] | None = None,
    end: bool = True,
    progress: Callable[[int], object] | None = None,
) -> list[list[list[Answer]]]:
    """Log-probabilities of given answers, as `BlankGenerator` would have found them on the way to these answers.

    An answer is read behind those of the blanks that come before it, each as it is given.

    Args:
        generator: whose model, special tokens and length_penalty are used; its processors are not.
        contexts: N contexts, token ids with mask tokens as blanks.
        candidates: for each context any number of candidates, each with one list of ids for every blank, from left to
            right. Ids that finish with an end token are scored with it.
        orders: for each context the order in which its blanks are filled, numbers from 0; left to right if None.
        end: whether the end-of-piece token is scored behind answers that have no end token.
        progress: called with the number of contexts that have been scored since the last call.

    Returns:
        per context and candidate one answer per blank, from left to right; its tokens are without the end token,
        `score` is the sum of its log-probabilities / their number ** length_penalty.

    Raises:
        UserError: numbers of contexts, candidates, blanks that do not fit; what the positions do not reach; a
            log-probability is NaN or infinite.
    """
    if len(candidates) != len(contexts):
        raise UserError(f"answers for {len(candidates)} contexts, but there are {len(contexts)}; give some for each")
    framing, requests, given = generator.framing, [], []
    for number, (context, own) in enumerate(zip(contexts, candidates, strict=True)):
        prompt = framing.prompt(context, None if orders is None else orders[number])
        if sorted(prompt.order) != list(range(len(prompt.places))):
            raise UserError(
                f"order {list(prompt.order)} is not one of all {len(prompt.places)} blanks; name each of 0 to "
                f"{len(prompt.places) - 1}"
            )
        requests.append(Request(prompt))
        given.append(_checked(framing, requests[-1], own, end))
    with evaluation_mode(generator.model):
        scored = score(generator.model, framing, requests, given, progress or (lambda count: None))
    penalty = generator.config.length_penalty
    return [
        [_answers(framing, *pair, penalty) for pair in zip(own, found, strict=True)]
        for own, found in zip(given, scored, strict=True)
    ]


def check_answers(
    generator: BlankGenerator,
    context: Sequence[int],
    candidates: Sequence[Sequence[Sequence[int]]],
    end: bool = True,
) -> None:
    """Raises the UserError that `score_ids` would raise for this context with these candidates."""
    _checked(generator.framing, Request(generator.framing.prompt(context)), candidates, end)


def _checked(
    framing: BlankFraming, request: Request, candidates: Sequence[Sequence[Sequence[int]]], end: bool
) -> list[Given]:
    """The candidates as they are read; refuses those that cannot be."""
    prompt, given = request.prompt, []
    for candidate in candidates:
        if len(candidate) != len(prompt.places):
            raise UserError(f"{len(candidate)} answers for {len(prompt.places)} blanks; give one for each")
        answers = {number: list(map(int, candidate[number])) for number in prompt.order}
        for answer in answers.values():
            if end and not (answer and answer[-1] in framing.ends):
                answer.append(framing.ends[0])
        framing.branch(request, answers)  # refuses what cannot be read
        given.append(answers)
    return given


def _words(framing: BlankFraming, answer: list[int]) -> list[int]:
    """An answer without its end token."""
    return answer[:-1] if answer and answer[-1] in framing.ends else answer


def _answers(framing: BlankFraming, given: Given, scored: Scored, penalty: float) -> list[Answer]:
    """A candidate's answers from left to right."""
    remaining, found = iter(scored.logprobs), {}
    for number, answer in given.items():
        own = [next(remaining) for _ in answer]
        found[number] = Answer(_words(framing, answer), own, sum(own) / max(len(own), 1) ** penalty)
    return [found[number] for number in range(len(found))]
