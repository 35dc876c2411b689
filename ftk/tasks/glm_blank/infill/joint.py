"""The n best answers to a text as a whole: what is found for one blank decides what is asked at the next."""

from __future__ import annotations

import copy
import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.errors import UserError
from ftk.generation.blanks import find_blanks
from ftk.generation.in_flight import Prompt
from ftk.generation.sampling import prompt_key
from ftk.generation.search import strategy
from ftk.generation.search.beam import BeamSearch
from ftk.generation.search.diverse_beam import DiverseBeamSearch
from ftk.tasks.glm_blank.infill.orders import blank_numbers

if TYPE_CHECKING:
    from ftk.generation.processors.base import Processors
    from ftk.generation.search import Answer
    from ftk.tasks.glm_blank.infill.generator import BlankGenerator


@dataclass(frozen=True)
class Filling:
    """All blanks of a context with their answers.

    Attributes:
        answers: one a blank, from left to right.
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
    generator: BlankGenerator,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    progress: Callable[[int], object],
    processors: Sequence[Processors | None],
) -> list[list[Filling]]:
    """The n best fillings of each context.

    Beams: the best `beam` fillings of the blanks so far are each gone on with, every one with a beam of its own for
    the next blank, which sees its answers; of all continuations together the best `beam` stay. Sampling: `nbest`
    fillings are drawn, each blank given the draws before it.

    Args:
        generator: does the searches; its `blank_order` and `reencode` hold.
        contexts, seeds, progress, processors: as for `BlankGenerator.fill_ids`.

    Returns:
        per context its fillings, best first, `nbest` at most. Their answers have no others.

    Raises:
        UserError: the strategy neither keeps a beam nor draws.
    """
    target = generator.strategy.target
    if issubclass(target, BeamSearch | DiverseBeamSearch):
        return _carry_beams(generator, contexts, seeds, progress, processors)
    if generator.strategy.draws(len(generator.ends)) == 0:
        raise UserError(
            f"nbest_over is text, but {generator.config.strategy} search has one answer to a text; "
            "take a beam (--beam 4) or --sampling"
        )
    return _draw(generator, contexts, seeds, progress, processors)


def _draw(
    generator: BlankGenerator,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    progress: Callable[[int], object],
    processors: Sequence[Processors | None],
) -> list[list[Filling]]:
    """`nbest` independent fillings of each context; the first is the one that is drawn alone."""
    count = generator.config.nbest
    found = _with_nbest(generator, 1).fill_ids(
        [context for context in contexts for _ in range(count)],
        [_own_seed(seed, number) for seed in seeds for number in range(count)],
        processors=[own for own in processors for _ in range(count)],
    )
    fillings = [filling(answers, generator.config.length_penalty) for answers in found]
    progress(len(contexts))
    return [_best(fillings[first : first + count], count) for first in range(0, len(fillings), count)]


def _carry_beams(
    generator: BlankGenerator,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    progress: Callable[[int], object],
    processors: Sequence[Processors | None],
) -> list[list[Filling]]:
    """One blank of all contexts a round."""
    config, searching = generator.config, _with_nbest(generator, generator.config.beam)
    blanks = [find_blanks(context, generator.masks) for context in contexts]
    orders = [blank_numbers(config.blank_order, len(places)) for places in blanks]
    going = [
        [_Hypothesis(list(map(int, context)), dict(enumerate(places)), processors=own)]
        for context, places, own in zip(contexts, blanks, processors, strict=True)
    ]
    for step in range(max(map(len, orders), default=0)):
        there = [index for index, order in enumerate(orders) if len(order) > step]
        prompts = [
            [
                one.prompt(orders[index][step], generator.masks, _own_seed(seeds[index], number))
                for number, one in enumerate(going[index])
            ]
            for index in there
        ]
        deque(searching.fill_prompts([prompt for group in prompts for prompt in group]), maxlen=0)
        for index, group in zip(there, prompts, strict=True):
            number = orders[index][step]
            continued = [
                one.answered(number, answer, config.reencode)
                for one, prompt in zip(going[index], group, strict=True)
                for answer in (prompt.answers[0], *prompt.answers[0].others)
            ]
            continued.sort(key=lambda one: -one.filling(config.length_penalty).score)
            going[index] = continued[: config.beam]
        progress(sum(len(orders[index]) == step + 1 for index in there))
    return [_best([one.filling(config.length_penalty) for one in row], config.nbest) for row in going]


@dataclass(frozen=True)
class _Hypothesis:
    """A context with some of its blanks filled, one way among others."""

    context: list[int]
    places: Mapping[int, int]  # of all blanks that are open: number -> place in the context
    filled: tuple[tuple[int, list[int]], ...] = ()  # place and answer, as they were filled
    answers: Mapping[int, Answer] = field(default_factory=dict)
    processors: Processors | None = None

    def prompt(self, number: int, masks: Sequence[int], seed: int) -> Prompt:
        """The question for blank `number`."""
        return Prompt(self.context, masks, seed, [number], self.filled, self.places, processors=self.processors)

    def answered(self, number: int, answer: Answer, reencode: bool) -> _Hypothesis:
        """Blank `number` has this answer, in its place (`reencode`) or behind the context."""
        answer = dataclasses.replace(answer, others=())
        answers, place = {**self.answers, number: answer}, self.places[number]
        places = {other: at for other, at in self.places.items() if other != number}
        if not reencode:
            filled = (*self.filled, (place, answer.tokens))
            return _Hypothesis(self.context, places, filled, answers, self.processors)
        context = [*self.context[:place], *answer.tokens, *self.context[place + 1 :]]
        shift = len(answer.tokens) - 1
        places = {other: at + shift if at > place else at for other, at in places.items()}
        return _Hypothesis(context, places, (), answers, self.processors)

    def filling(self, length_penalty: float) -> Filling:
        """The answers so far, from left to right."""
        return filling([self.answers[number] for number in sorted(self.answers)], length_penalty)


def _with_nbest(generator: BlankGenerator, count: int) -> BlankGenerator:
    """The same generator, but for the n best of each blank."""
    other = copy.copy(generator)
    other.config = dataclasses.replace(generator.config, nbest=count, nbest_over="blank")
    other.strategy = strategy(other.config)
    return other


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
