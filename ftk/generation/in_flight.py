"""Keeps a decoder's rows busy: prompts that are complete leave, waiting ones take their rows while others go on."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.blanks import Chunk, context_chunk, find_blanks, next_chunk
from ftk.generation.decoder import CachedDecoder
from ftk.generation.fusion import FusedDecoder, LanguageModelRecord
from ftk.generation.processors.base import Processors
from ftk.generation.processors.per_prompt import PerPrompt
from ftk.generation.sampling import prompt_key, step_numbers
from ftk.generation.search import Answer, Move, Search, Strategy, Task, not_finite
from ftk.generation.token_stream import NewTokens, TokenStream

CHECK_EVERY = 8
"""Steps after which a GPU is asked whether answers are complete: to ask it is to wait for it."""

ENTER_TOGETHER = 4
"""Rows that are free are given to prompts when they are one part in so many of all. Each time a search of its own
begins, so that fewer at once mean more small operators a step, and more at once mean rows that stand idle."""


class Prompt:
    """A context on its way: its blanks, and the answers found so far.

    Args:
        context: token ids.
        masks: ids that stand for a blank.
        seed: of random numbers.
        order: numbers of the blanks that are to be filled, in this order; all from left to right if None.
        filled: place and answer of blanks that were filled before, as they are read behind the context.
        places: where each blank is; where the masks are if None.
        index: its number, as prompts were given.
        processors: its own, instead of those of all.
    """

    def __init__(
        self,
        context: list[int],
        masks: Sequence[int],
        seed: int,
        order: Sequence[int] | None = None,
        filled: Sequence[tuple[int, list[int]]] = (),
        places: Mapping[int, int] | None = None,
        index: int = 0,
        processors: Processors | None = None,
    ) -> None:
        self.context = context
        places = dict(enumerate(find_blanks(context, masks))) if places is None else places
        self.order = list(range(len(places)) if order is None else order)
        self.blanks = [places[number] for number in self.order]
        self.filled = list(filled)
        self.seed = seed
        self.index = index
        self.processors = processors
        self.answers: list[Answer] = []  # in this order

    def chunk(self, sop: int, in_blocks: bool) -> Chunk:
        """What is read before the next blank is filled: the context at first, later the answer before it."""
        number = len(self.answers)
        if number == 0:
            return context_chunk(self.context, sop, self.blanks[0], self.filled, in_blocks)
        return next_chunk(self.answers[-1].tokens, self.blanks[number - 1], sop, self.blanks[number], in_blocks)

    def capacity(self, max_len: int) -> int:
        """Most tokens that it will have settled, if no answer is longer than `max_len`."""
        read = len(self.context) + sum(len(answer) + 1 for _, answer in self.filled)
        return read + (len(self.blanks) - 1) * (max_len + 1) + 1

    @property
    def number(self) -> int:
        """Of the blank that is being filled, from left to right."""
        return self.order[len(self.answers)]

    @property
    def answers_in_text(self) -> list[Answer]:
        """The answers from left to right."""
        return [answer for _, answer in sorted(zip(self.order, self.answers, strict=True), key=lambda pair: pair[0])]

    @property
    def is_complete(self) -> bool:
        """Whether every blank has an answer."""
        return len(self.answers) == len(self.blanks)


class InFlight:
    """Prompts that are answered together, in the rows of one decoder.

    Rows that begin an answer at the same time are a group with a search of its own; all groups share each step of
    the decoder. A prompt's answers are the same whatever rows, groups and neighbours it has.

    Args:
        decoder: free, with as many rows as there may be prompts at once; with a language model beside it or not.
        strategy: how answers are searched for.
        processors: of scores, for prompts without their own.
        ends: tokens that end an answer.
        sop: the start token.
        refill: whether a prompt leaves when it is complete and another one enters; else batch after batch.
        stream: keeps what is written, for the caller of `run`; None where nobody asks.
    """

    def __init__(
        self,
        decoder: CachedDecoder | FusedDecoder,
        strategy: Strategy,
        processors: Processors,
        ends: tuple[int, ...],
        sop: int,
        refill: bool = True,
        stream: TokenStream | None = None,
    ) -> None:
        self.decoder = decoder
        self.strategy = strategy
        self.processors = processors
        self.ends = ends
        self.sop = sop
        self.refill = refill
        self.quorum = -(-decoder.num_rows // ENTER_TOGETHER)
        self.stream = stream
        # With a stream the host waits for the tokens of each step anyway.
        self.check_every = 1 if decoder.device.type == "cpu" or stream is not None else CHECK_EVERY
        self.num_steps = 0  # of the decoder
        self.waiting: deque[Prompt] = deque()
        self.groups: list[_Group] = []
        self.between: dict[int, Prompt] = {}  # row -> prompt that has filled a blank and has more
        self.free = list(range(decoder.num_rows))
        shape = (decoder.num_rows, strategy.width)
        self.tokens = torch.zeros(shape, dtype=torch.int64, device=decoder.device)
        self.own_places = torch.arange(strategy.width, device=decoder.device).expand(shape)

    def run(self, prompts: Iterable[Prompt], done: Callable[[Prompt], object]) -> Iterator[NewTokens]:
        """Answers the blanks of all prompts; each has at least one.

        Args:
            prompts: they enter in this order.
            done: called with each prompt that is complete.

        Yields:
            what `stream` has, after each step.
        """
        self.waiting.extend(prompts)
        while True:
            self._begin(done)
            if self.stream is not None:
                yield from self.stream.take()
            if not self.groups and not self.waiting and not self.between:
                return
            if self.groups:
                self._step(done)
            if self.stream is not None:
                yield from self.stream.take()

    def _begin(self, done: Callable[[Prompt], object]) -> None:
        """Lets prompts read what comes next, if enough of them wait for it or nothing else is to be done."""
        is_empty = len(self.free) == self.decoder.num_rows
        entering = min(len(self.free), len(self.waiting)) if self.refill or is_empty else 0
        count = entering + len(self.between)
        enough = self.quorum if self.waiting else 1
        if count == 0 or (self.groups and not (self.refill and count >= enough)):
            return
        rows, prompts = list(self.between), list(self.between.values())
        self.between.clear()
        if entering:
            self.free.sort()
            new_rows, self.free = self.free[:entering], self.free[entering:]
            new = [self.waiting.popleft() for _ in new_rows]
            self.decoder.enter(new_rows, [len(prompt.context) for prompt in new])
            rows, prompts = rows + new_rows, prompts + new
        chunks = [prompt.chunk(self.sop, self.decoder.in_blocks) for prompt in prompts]
        first = self.decoder.read(rows, chunks)  # [N, V]
        if isinstance(self.decoder, FusedDecoder):
            first = self.decoder.beside(first, rows, prompts)  # [N, 2 V]
        group = _Group(self._search(rows, prompts), rows, prompts, self._record(), first[:, None])
        self.groups.append(group)
        self._collect(group, done)

    def _record(self) -> LanguageModelRecord | None:
        """Of what a language model says, where there is one."""
        return LanguageModelRecord(self.ends) if isinstance(self.decoder, FusedDecoder) else None

    def _search(self, rows: Sequence[int], prompts: Sequence[Prompt]) -> Search:
        """A search for the next blank of each of these prompts."""
        device, states = self.decoder.device, self.decoder.states
        numbers = [prompt.number for prompt in prompts]
        task = Task(
            len(prompts),
            self.ends,
            device,
            self._uniforms(prompts),
            [prompt.context for prompt in prompts],
            numbers,
            None if states is None else states.of(torch.tensor(rows, device=device)),
            self.decoder.language_model.fusion if isinstance(self.decoder, FusedDecoder) else None,
        )
        return self.strategy.build(task, self._processors(prompts))

    def _processors(self, prompts: Sequence[Prompt]) -> Processors:
        """Those of all prompts, or of each its own. What they keep about hypotheses belongs to one search."""
        if any(prompt.processors is not None for prompt in prompts):
            return PerPrompt([self._of(prompt) for prompt in prompts])
        return copy.deepcopy(self.processors) if self.processors.keeps_state else self.processors

    def _of(self, prompt: Prompt) -> Processors:
        return self.processors if prompt.processors is None else prompt.processors

    def _uniforms(self, prompts: Sequence[Prompt]) -> Tensor | None:
        """float64 [N, max_len, D]: the random numbers of the prompts' next blanks; None where none are drawn."""
        draws = self.strategy.draws(len(self.ends))
        if draws == 0:
            return None
        max_len = self.strategy.config.max_len
        numbers = [
            torch.from_numpy(step_numbers([prompt_key(p.seed, p.context)], p.number, max_len, draws)) for p in prompts
        ]
        return torch.cat(numbers).to(self.decoder.device)

    def _step(self, done: Callable[[Prompt], object]) -> None:
        """One more token in all groups."""
        num_rows = 1 + max(row for group in self.groups for row in group.rows)
        first = self.groups[0]
        alone = len(self.groups) == 1 and first.rows == list(range(num_rows))
        if alone:
            tokens, sources = first.move
        else:
            tokens, sources = self._moves(num_rows)
        if sources is not None:
            self.decoder.reorder(sources)
        logits = self.decoder.step(tokens)  # [R, W, V]
        self.num_steps += 1
        for group in self.groups:
            group.advance(logits if alone else logits[group.index])
        for group in list(self.groups):
            self._collect(group, done)
        if self.refill and not self.waiting and self.decoder.states is None:
            self._close_up()

    def _moves(self, num_rows: int) -> Move:
        """The moves of all groups, each in its rows."""
        for group in self.groups:
            self.tokens[group.index] = group.move.tokens
        if all(group.move.sources is None for group in self.groups):
            return Move(self.tokens[:num_rows], None)
        sources = self.own_places[:num_rows].clone()
        for group in self.groups:
            if group.move.sources is not None:
                sources[group.index] = group.move.sources
        return Move(self.tokens[:num_rows], sources)

    def _collect(self, group: _Group, done: Callable[[Prompt], object]) -> None:
        """Takes the answers that are complete; their rows go on to the next blank, or become free."""
        if self.stream is not None:
            self.stream.step(group.prompts, group.search)
        finished = self._finished(group)
        if not any(finished):
            return
        for place, (prompt, row, is_finished, answers) in enumerate(
            zip(group.prompts, group.rows, finished, group.search.answers(), strict=True)
        ):
            if not is_finished:
                continue
            answers = group.search.likeliest.given_to(answers, place)
            if group.record is not None:
                answers = group.record.given_to(answers, place)
            answer = self._answer(prompt, answers)
            if self.stream is not None:
                self.stream.answered(prompt, prompt.number, answer)
            prompt.answers.append(answer)
            if prompt.is_complete:
                self.free.append(row)
                done(prompt)
            else:
                self.between[row] = prompt
        self.decoder.leave([row for row, is_finished in zip(group.rows, finished, strict=True) if is_finished])
        if all(finished):
            self.groups.remove(group)
        else:
            group.keep([place for place, is_finished in enumerate(finished) if not is_finished])

    def _finished(self, group: _Group) -> list[bool]:
        """Which of a group's prompts are to leave it now."""
        count = len(group.rows)
        if group.num_steps == self.strategy.num_steps:
            return [True] * count
        if self.num_steps % self.check_every:  # the same steps for all groups, so that they wait together
            return [False] * count
        finished: list[bool] = group.search.finished().tolist()
        return finished if self.refill or all(finished) else [False] * count

    def _close_up(self) -> None:
        """Rows that will stay free are filled from behind, so that a step computes fewer rows."""
        for group in self.groups:
            for place, row in enumerate(group.rows):
                target = min(self.free, default=row)
                if target < row and row >= self.decoder.num_rows - len(self.free):
                    self.decoder.move(row, target)
                    self.free.remove(target)
                    self.free.append(row)
                    group.take_row(place, target)

    def _answer(self, prompt: Prompt, answers: Sequence[Answer]) -> Answer:
        """The best answer to the blank that is being filled, with the others."""
        if not answers:
            raise UserError("the model gives no token a probability above 0; its weights may hold NaN")
        best, *others = (self._cut(prompt, answer) for answer in answers)
        if not math.isfinite(best.score):
            raise not_finite()
        return dataclasses.replace(best, others=tuple(others))

    def _cut(self, prompt: Prompt, answer: Answer) -> Answer:
        """The answer without what processors do not count: what stands behind a stop string."""
        length = self._of(prompt).length(prompt.number, answer.tokens)
        if length == len(answer.tokens):
            return answer
        names = ("tokens", "token_logprobs", "alternatives", "lm_logprobs")
        parts = {name: getattr(answer, name)[:length] for name in names}
        return dataclasses.replace(answer, end=None, num_scored=len(answer.token_logprobs), **parts)


class _Group:
    """Prompts that began an answer together."""

    def __init__(
        self,
        search: Search,
        rows: list[int],
        prompts: list[Prompt],
        record: LanguageModelRecord | None,
        logits: Tensor,
    ) -> None:
        self.search = search
        self.rows = rows
        self.prompts = prompts
        self.record = record
        self.num_steps = 0
        self.index = torch.tensor(rows, device=logits.device)
        self.advance(logits)

    def advance(self, logits: Tensor) -> None:
        """logits [N, 1 or W, V] of its rows"""
        self.move = self.search.advance(logits)
        if self.record is not None:
            self.record.add(logits, self.move)
        self.num_steps += 1

    def keep(self, places: list[int]) -> None:
        """Of its prompts only those at `places` stay."""
        index = torch.tensor(places, device=self.index.device)
        self.search.keep(index)
        if self.record is not None:
            self.record.keep(index)
        tokens, sources = self.move
        self.move = Move(tokens[index], None if sources is None else sources[index])
        self.rows = [self.rows[place] for place in places]
        self.prompts = [self.prompts[place] for place in places]
        self.index = self.index[index]

    def take_row(self, place: int, row: int) -> None:
        """Its prompt at `place` is in this row now."""
        self.rows[place] = row
        self.index = torch.tensor(self.rows, device=self.index.device)
