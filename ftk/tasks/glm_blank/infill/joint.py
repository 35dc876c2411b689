"""The n best answers to a text as a whole: what is found for one blank decides what is asked at the next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ftk.errors import UserError
from ftk.generation.engine.request import Request
from ftk.generation.search import Answer, strategy
from ftk.generation.search.beam import BeamSearch
from ftk.generation.search.diverse_beam import DiverseBeamSearch
from ftk.generation.search.random import prompt_key
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.infill.framing import BlankPrompt

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.generator import BlankGenerator


@dataclass(frozen=True)
class Filling:
    """All blanks of a context with their answers.

    Attributes:
        answers: one per blank, from left to right.
        score: the sum of the processed scores of all their tokens / number of these ** length_penalty, end tokens
            counted: for one blank its answer's score.
    """

    answers: list[Answer]
    score: float


def filling(answers: Sequence[Answer], length_penalty: float) -> Filling:
    """Answers to all blanks of a context, from left to right, with their score together."""
    total = sum(_sum_of_scores(answer, length_penalty) for answer in answers)
    return Filling(list(answers), total / max(1, sum(map(_num_scored, answers))) ** length_penalty)


def fill_jointly(
    generator: BlankGenerator, requests: Sequence[Request], progress: Callable[[int], object]
) -> list[list[Filling]]:
    """The n best fillings of each context.

    Beams: the best `beam` fillings of the blanks so far are each gone on with, every one with a beam of its own for
    the next blank, which sees its answers; of all continuations together the best `beam` stay. Sampling: `nbest`
    fillings are drawn, each blank given the draws before it.

    Args:
        generator: does the searches; its `blank_order` and `reencode` hold.
        requests: for all blanks of each context.
        progress: as for `BlankGenerator.fill_ids`.

    Returns:
        per context its fillings, best first, `nbest` at most. Their answers have no others.

    Raises:
        UserError: the strategy neither keeps a beam nor draws.
    """
    chosen = strategy(generator.config)
    if issubclass(chosen.target, BeamSearch | DiverseBeamSearch):
        return _carry_beams(generator, requests, progress)
    if chosen.draws(len(generator.framing.ends)) == 0:
        raise UserError(
            f"nbest_over is text, but {generator.config.strategy} search has one answer to a text; "
            "take a beam (`beam` 4) or `sampling`"
        )
    return _draw(generator, requests, progress)


def _draw(
    generator: BlankGenerator, requests: Sequence[Request], progress: Callable[[int], object]
) -> list[list[Filling]]:
    """`nbest` independent fillings of each context; the first is the one that is drawn alone."""
    count, options = generator.config.nbest, _single(generator.config, 1)
    samples = [
        replace(request, options=options, seed=_own_seed(request.seed, number))
        for request in requests
        for number in range(count)
    ]
    found = [filling(answers, options.length_penalty) for answers in generator.filled(samples)]
    progress(len(requests))
    return [_best(found[first : first + count], count) for first in range(0, len(found), count)]


def _carry_beams(
    generator: BlankGenerator, requests: Sequence[Request], progress: Callable[[int], object]
) -> list[list[Filling]]:
    """One blank of all contexts a round."""
    config, options = generator.config, _single(generator.config, generator.config.beam)
    penalty = config.length_penalty
    going = [[_Hypothesis(request.prompt)] for request in requests]
    while open_ones := [index for index, row in enumerate(going) if row[0].prompt.order]:
        asked = [
            replace(
                requests[index],
                prompt=replace(one.prompt, order=one.prompt.order[:1]),
                options=options,
                seed=_own_seed(requests[index].seed, number),
            )
            for index in open_ones
            for number, one in enumerate(going[index])
        ]
        found = iter(generator.filled(asked))
        for index in open_ones:
            continued = [
                one.answered(answer)
                for one, (best,) in zip(going[index], found, strict=False)
                for answer in (best, *best.others)
            ]
            continued.sort(key=lambda one: -one.filling(penalty).score)
            going[index] = continued[: config.beam]
        progress(sum(not going[index][0].prompt.order for index in open_ones))
    return [_best([one.filling(penalty) for one in row], config.nbest) for row in going]


@dataclass(frozen=True)
class _Hypothesis:
    """A context with some of its blanks filled, one way among others."""

    prompt: BlankPrompt
    answers: Mapping[int, Answer] = field(default_factory=dict)

    def answered(self, answer: Answer) -> _Hypothesis:
        """The next blank has this answer."""
        number = self.prompt.order[0]
        answers = {**self.answers, number: replace(answer, others=())}
        return _Hypothesis(self.prompt.answered(number, answer.tokens), answers)

    def filling(self, length_penalty: float) -> Filling:
        """The answers so far, from left to right."""
        return filling([self.answers[number] for number in sorted(self.answers)], length_penalty)


def _single(config: FillConfig, count: int) -> FillConfig:
    """The same search, for the n best of each blank."""
    return replace(config, nbest=count, nbest_over="blank")


def _own_seed(seed: int, number: int) -> int:
    """The seed of sample, or hypothesis, `number` of a prompt; the first has the prompt's own."""
    return seed if number == 0 else prompt_key(seed, [number])


def _best(fillings: Sequence[Filling], count: int) -> list[Filling]:
    """Best first; of equals the earlier one."""
    return sorted(fillings, key=lambda one: -one.score)[:count]


def _num_scored(answer: Answer) -> int:
    """Tokens that its score counts, also those that a stop string has cut off."""
    return answer.num_scored or len(answer.token_logprobs)


def _sum_of_scores(answer: Answer, length_penalty: float) -> float:
    """What its score was before it was divided."""
    return answer.score * _num_scored(answer) ** length_penalty
