"""In which order the blanks of a context are filled, and how what is filled is read: round by round, where needed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ftk.generation.blanks import find_blanks
from ftk.generation.in_flight import Prompt
from ftk.tasks.glm_blank.infill.scoring import first_token_logprobs

if TYPE_CHECKING:
    from ftk.generation.processors.base import Processors
    from ftk.generation.search import Answer
    from ftk.generation.token_stream import NewTokens, TokenStream
    from ftk.tasks.glm_blank.infill.generator import BlankGenerator


def blank_numbers(order: str, count: int) -> list[int]:
    """The blanks' numbers, from 0 on, in the order in which they are filled.

    Args:
        order: "left", or numbers from 1 on with commas between: these first, as far as they are there, then the
            others from left to right.
        count: blanks there are.
    """
    named = [] if order == "left" else [int(one) - 1 for one in order.split(",")]
    first = dict.fromkeys(number for number in named if number < count)
    return [*first, *(number for number in range(count) if number not in first)]


@dataclass
class _Open:
    """A context on its way, one blank a round."""

    index: int  # as they were given
    context: list[int]
    seed: int
    places: dict[int, int]  # of the blanks that are open: number -> place in the context
    order: list[int]  # the numbers of the blanks that are open
    processors: Processors | None = None
    filled: list[tuple[int, list[int]]] = field(default_factory=list)  # place and answer, as they were filled
    answers: dict[int, Answer] = field(default_factory=dict)


def fill_in_rounds(
    generator: BlankGenerator,
    contexts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    progress: Callable[[int], object],
    stream: TokenStream | None = None,
    processors: Sequence[Processors | None] | None = None,
) -> Generator[NewTokens, None, list[list[Answer]]]:
    """Fills one blank of every context, then the next: the order may depend on what was found, and so may contexts.

    With `reencode` an answer takes the place of its blank, and the context is read anew, so that all its tokens see
    the answer. Else it stays behind the context, as in the original.

    Args:
        generator: does a round; its `blank_order` and `reencode` say how.
        contexts, seeds, progress, processors: as for `BlankGenerator.fill_ids`.
        stream: keeps what is written, for the caller; None where nobody asks.

    Yields:
        what `stream` has, as it comes.

    Returns:
        per context one answer a blank, from left to right.
    """
    config = generator.config
    confident = config.blank_order == "confident"
    everything = []
    processors = [None] * len(contexts) if processors is None else processors
    for index, (context, seed, own) in enumerate(zip(contexts, seeds, processors, strict=True)):
        blanks = find_blanks(context, generator.masks)
        order = blank_numbers("left" if confident else config.blank_order, len(blanks))
        everything.append(_Open(index, list(map(int, context)), seed, dict(enumerate(blanks)), order, own))
    while going := [one for one in everything if one.order]:
        if confident:
            _surest_first(generator, going)
        prompts = []
        for one in going:
            number = one.order.pop(0)
            parts = (one.seed, [number], one.filled, one.places, one.index, one.processors)
            prompts.append(Prompt(one.context, generator.masks, *parts))
        yield from generator.fill_prompts(prompts, stream=stream)
        for one, prompt in zip(going, prompts, strict=True):
            (answer,) = prompt.answers
            _take(one, prompt.order[0], answer, config.reencode)
        progress(sum(not one.order for one in going))
    return [[one.answers[number] for number in sorted(one.answers)] for one in everything]


def _take(one: _Open, number: int, answer: Answer, reencode: bool) -> None:
    """A blank has its answer."""
    place = one.places.pop(number)
    one.answers[number] = answer
    if not reencode:
        one.filled.append((place, answer.tokens))
        return
    one.context = [*one.context[:place], *answer.tokens, *one.context[place + 1 :]]
    shift = len(answer.tokens) - 1
    one.places = {other: at + shift if at > place else at for other, at in one.places.items()}


def _surest_first(generator: BlankGenerator, going: Sequence[_Open]) -> None:
    """Puts the blank whose answer begins most surely at the front; of equally sure ones the first in the text."""
    several = [one for one in going if len(one.order) > 1]
    if not several:
        return
    found = first_token_logprobs(
        generator,
        [one.context for one in several],
        [one.filled for one in several],
        [[one.places[number] for number in sorted(one.order)] for one in several],
    )
    for one, logprobs in zip(several, found, strict=True):
        numbers = sorted(one.order)
        surest = numbers[max(range(len(numbers)), key=logprobs.__getitem__)]
        one.order = [surest, *(number for number in numbers if number != surest)]
