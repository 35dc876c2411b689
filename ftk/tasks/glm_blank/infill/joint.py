"""The n best answers to a text as a whole: what is found for one blank decides what is asked at the next."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ftk.errors import UserError
from ftk.generation.engine.request import Event, Request
from ftk.generation.search import Answer, strategy
from ftk.generation.search.beam import BeamSearch
from ftk.generation.search.diverse_beam import DiverseBeamSearch
from ftk.generation.search.random import prompt_key
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.framing import BlankPrompt

Fill = Callable[[Sequence[Request]], list[list[Answer]]]
"""Requests -> the answers to the blanks of each, from left to right."""


@dataclass(frozen=True)
class Filling:
    """All blanks of a context with their answers, from left to right.

    Attributes:
        answers: one per blank.
        score: the sum of the processed scores of all their tokens / number of these ** length_penalty, end tokens
            counted: for one blank its answer's score.
    """

    answers: list[Answer]
    score: float


def filling(answers: Sequence[Answer], length_penalty: float) -> Filling:
    """Answers to all blanks of a context with their score together."""
    total = sum(answer.score * _num_scored(answer) ** length_penalty for answer in answers)
    return Filling(list(answers), total / max(1, sum(map(_num_scored, answers))) ** length_penalty)


def fillings_of(answers: Sequence[Answer], length_penalty: float) -> list[Filling]:
    """The n best fillings, best first, that `fill_jointly` has put into one list of answers."""
    every = zip(*((replace(answer, others=()), *answer.others) for answer in answers), strict=True)
    return [filling(own, length_penalty) for own in every]


def fill_jointly(
    config: FillConfig, num_ends: int, requests: Sequence[Request], fill: Fill
) -> Generator[Event, None, None]:
    """The n best fillings of each context.

    Beams: the best `beam` fillings of the blanks so far each continue with a beam of their own for the next blank,
    which sees their answers; of all continuations together the best `beam` stay. Sampling: `nbest` fillings are drawn,
    each blank given the draws before it.

    Args:
        num_ends: tokens that end an answer.
        requests: for all blanks of each context.
        fill: answers each blank by itself.

    Yields:
        for each context its complete answers, those of the best filling; their `others` are the answers of the further
        fillings, `nbest` - 1 at most (see `fillings_of`).

    Raises:
        UserError: the strategy neither keeps a beam nor draws.
    """
    chosen = strategy(config)
    if issubclass(chosen.target, BeamSearch | DiverseBeamSearch):
        found = _carry_beams(config, requests, fill)
    elif chosen.draws(num_ends):
        found = _draw(config, requests, fill)
    else:
        raise UserError(
            f"nbest_over is text, but {config.strategy} search has one answer to a text; "
            "take a beam (`beam` 4) or `sampling`"
        )
    for place, fillings in found:
        # Of equals the earlier one.
        best, *others = sorted(fillings, key=lambda filling: -filling.score)[: config.nbest]
        for number, first in enumerate(best.answers):
            answer = replace(first, others=tuple(other.answers[number] for other in others))
            yield Event(place, "answer", number, answer.tokens, answer.token_logprobs, answer)
        yield Event(place, "done")


def _draw(config: FillConfig, requests: Sequence[Request], fill: Fill) -> Iterator[tuple[int, list[Filling]]]:
    """`nbest` independent fillings of each context; the first is the one that is drawn alone."""
    count, options = config.nbest, replace(config, nbest=1, nbest_over="blank")
    samples = [
        replace(request, options=options, seed=_own_seed(request.seed, number))
        for request in requests
        for number in range(count)
    ]
    found = [filling(answers, config.length_penalty) for answers in fill(samples)]
    for place in range(len(requests)):
        yield place, found[place * count : (place + 1) * count]


def _carry_beams(config: FillConfig, requests: Sequence[Request], fill: Fill) -> Iterator[tuple[int, list[Filling]]]:
    """One blank of all contexts a round."""
    options = replace(config, nbest=config.beam, nbest_over="blank")
    going = {place: [_Hypothesis(request.prompt)] for place, request in enumerate(requests)}
    while going:
        asked = [
            replace(
                requests[place],
                prompt=replace(hypothesis.prompt, order=hypothesis.prompt.order[:1]),
                options=options,
                seed=_own_seed(requests[place].seed, number),
            )
            for place, hypotheses in going.items()
            for number, hypothesis in enumerate(hypotheses)
        ]
        found = iter(fill(asked))
        for place, hypotheses in list(going.items()):
            continued = [
                hypothesis.answered(answer)
                for hypothesis, (best,) in zip(hypotheses, found, strict=False)
                for answer in (best, *best.others)
            ]
            continued.sort(key=lambda hypothesis: -hypothesis.filling(config.length_penalty).score)
            going[place] = continued[: config.beam]
            if not continued[0].prompt.order:
                yield place, [hypothesis.filling(config.length_penalty) for hypothesis in going.pop(place)]


@dataclass(frozen=True)
class _Hypothesis:
    """A context with some of its blanks filled, one way among others."""

    prompt: BlankPrompt
    answers: Mapping[int, Answer] = field(default_factory=dict)

    def answered(self, answer: Answer) -> _Hypothesis:
        """With an answer to the next blank."""
        number = self.prompt.order[0]
        answers = {**self.answers, number: replace(answer, others=())}
        return _Hypothesis(self.prompt.answered(number, answer.tokens), answers)

    def filling(self, length_penalty: float) -> Filling:
        """The answers so far, from left to right."""
        return filling([self.answers[number] for number in sorted(self.answers)], length_penalty)


def _own_seed(seed: int, number: int) -> int:
    """The seed of sample, or hypothesis, `number` of a prompt; the first has the prompt's own."""
    return seed if number == 0 else prompt_key(seed, [number])


def _num_scored(answer: Answer) -> int:
    """Tokens that its score counts, also those that a stop string has cut off."""
    return answer.num_scored or len(answer.token_logprobs)
