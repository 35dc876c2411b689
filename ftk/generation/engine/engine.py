"""Continuous batching: requests are submitted, and each step lets some enter a decoder's rows or writes one token."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.decoder import CachedDecoder, Decoder
from ftk.generation.engine.fusion import FusedDecoder, LanguageModel, LanguageModelRecord
from ftk.generation.engine.request import Event, Frame, Framing, Request, check_ids
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.processors.base import index_of
from ftk.generation.processors.per_request import PerRequest
from ftk.generation.search import Answer, Move, Search, Strategy, Task, not_finite, strategy
from ftk.generation.search.random import prompt_key, step_numbers

CHECK_EVERY = 8
"""Steps after which a GPU is asked whether answers are complete: to ask it is to wait for it."""

ENTER_TOGETHER = 4
"""Rows that are free wait for company until they are one part in this many of all, see `enter_after_steps`. Each entry
begins a search of its own: fewer at once mean more small operators a step, more at once rows that stand idle."""

PATIENCE = 64
"""`enter_after_steps` where throughput counts and not the time to the first token."""

ONE_BY_ONE = ("seed", "batch_size")
"""Options in which requests of one search may differ."""

MAX_STRATEGIES = 64
"""Sets of options that an engine remembers: requests that come with one of them again share searches."""

_NOTHING = Frame((), {}, {})


class Engine:
    """Answers requests in the rows of one decoder: first come, first served.

    Rows that begin an answer at the same time with the same options are a group with a search of its own; all groups
    share each step of the decoder. In fp32 a request's answers are the same whatever rows, groups and neighbours it
    has, and one that fails (a processor raises, a logit is not finite) fails alone; where a search fails, so do the
    requests of its group. Memory and width are the decoder's, made once. The model must be in evaluation mode.

        number = engine.submit(Request(prompt))
        while engine.is_busy:
            for event in engine.step(): ...

    Args:
        decoder: free.
        framing: how prompts are read.
        enter_after_steps: steps that a request may wait, with a row free, for others to enter with it. 0: none. Where
            all that wait can enter none waits. Counted in steps, not in time: all ranks must decide the same.
    """

    def __init__(self, decoder: Decoder, framing: Framing, *, enter_after_steps: int = 0) -> None:
        self.decoder = decoder
        self.framing = framing
        self.enter_after_steps = enter_after_steps
        self.quorum = -(-decoder.num_rows // ENTER_TOGETHER)
        self.check_every = 1 if decoder.device.type == "cpu" else CHECK_EVERY
        self.num_steps = 0  # of the decoder
        self._numbers = itertools.count()
        self._strategies: dict[tuple[Any, ...], Strategy] = {}  # the one that was asked for last stands last
        self._waiting: dict[int, _Job] = {}  # in the order in which they came
        self._between: list[_Job] = []  # have a row and an answer, and will begin another
        self._groups: list[_Group] = []
        self._free = list(range(decoder.num_rows))
        self._held = 0  # steps since something could have entered
        self._events: list[Event] = []
        shape = (decoder.num_rows, decoder.width)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=decoder.device)
        self._own_places = torch.arange(decoder.width, device=decoder.device).expand(shape)

    def submit(self, request: Request) -> int:
        """Puts a request behind those that wait.

        Returns:
            its number, by which its events name it.

        Raises:
            UserError: its options are not allowed, the model cannot answer it or does not know one of its tokens, or
                this engine is too small for it.
        """
        own = self._strategy(request.options)
        self.framing.check(request)
        check_ids(self.decoder.model, self.framing.first(request).tokens)
        self._check_size(request, own)
        number = next(self._numbers)
        self._waiting[number] = _Job(number, request, own)
        return number

    @torch.inference_mode()
    def step(self) -> list[Event]:
        """Lets requests enter and begin their answers, or else writes one more token of each; tells what came of it."""
        if not self._enter() and self._groups:
            self._advance()
        events, self._events = self._events, []
        return events

    @property
    def is_busy(self) -> bool:
        """Whether a further step would do anything."""
        return bool(self._waiting or self._between or self._groups or self._events)

    @torch.inference_mode()
    def cancel(self, number: int) -> None:
        """Drops a request; there are no further events of it. One that is unknown, or done, is left alone."""
        self._events = [event for event in self._events if event.request != number]
        self._waiting.pop(number, None)
        for job in [job for job in self._between if job.number == number]:
            self._between.remove(job)
            self._free.append(job.row)
        for group in list(self._groups):
            self._drop(group, [place for place, job in enumerate(group.jobs) if job.number == number], free=True)

    def drain(self, numbers: Sequence[int]) -> Generator[Event, None, None]:
        """Takes steps until the engine stands idle, and gives their events.

        Args:
            numbers: of requests that are dropped if the iterator is closed before that.
        """
        try:
            while self.is_busy:
                yield from self.step()
        finally:
            for number in numbers:
                self.cancel(number)

    def answers(
        self, requests: Sequence[Request], progress: Callable[[int], object] = lambda count: None
    ) -> list[list[Answer]]:
        """The answers of each request, in the order in which its framing asks for them; alone with the engine.

        Args:
            requests: they enter in this order.
            progress: called with the number of requests that are done since the last call.

        Raises:
            Exception: what has made a request fail; as `submit`.
        """
        found: dict[int, list[Answer]] = {}
        try:
            for request in requests:
                found[self.submit(request)] = []
            while self.is_busy:
                for event in self.step():
                    if event.error is not None:
                        raise event.error
                    if event.answer is not None:
                        found[event.request].append(event.answer)
                    if event.kind == "done":
                        progress(1)
        finally:
            for number in found:
                self.cancel(number)
        return list(found.values())

    def score(self, requests: Sequence[Request], continuations: Sequence[Sequence[Any]]) -> list[list[Scored]]:
        """Log-probabilities of given continuations; see `ftk.generation.engine.scoring.score`."""
        return score(self.decoder.model, self.framing, requests, continuations)

    def _strategy(self, options: GenerationConfig) -> Strategy:
        """One for all requests with these options, so that they can share a search."""
        # As text: an option of a plugin may be a list.
        key = (type(options), repr([item for item in vars(options).items() if item[0] not in ONE_BY_ONE]))
        own = self._strategies.pop(key, None) or strategy(options)
        self._strategies[key] = own
        if len(self._strategies) > MAX_STRATEGIES:
            del self._strategies[next(iter(self._strategies))]
        return own

    def _check_size(self, request: Request, own: Strategy) -> None:
        """Refuses what does not fit the memory that was made with the decoder."""
        decoder, slots = self.decoder, self.framing.slots(request)
        if own.width > decoder.width:
            option = "beam" if own.width == request.options.beam else "nbest"
            raise UserError(
                f"{option} is {own.width}, but the engine was made for {decoder.width} hypotheses; lower {option}"
            )
        if own.num_steps - 1 > decoder.branch_capacity:
            raise UserError(
                f"max_len is {request.options.max_len}, but the engine was made for answers of "
                f"{decoder.branch_capacity + 1 - own.target.lookahead} tokens; lower max_len"
            )
        if slots > decoder.prefix_capacity:
            raise UserError(
                f"the prompt with its answers takes {slots} places, but the engine was made for "
                f"{decoder.prefix_capacity}; shorten it"
            )
        if own.target.observer is not None and decoder.observer is None:
            raise UserError(f"the engine was made without hidden states, which {request.options.strategy} search needs")

    def _enter(self) -> bool:
        """Lets requests read what comes next, if there are rows, and company or nothing to wait for."""
        room = min(len(self._free), len(self._waiting))
        count = room + len(self._between)
        if count == 0:
            return False
        if self._groups and room < len(self._waiting) and count < self.quorum and self._held < self.enter_after_steps:
            self._held += 1
            return False
        self._held = 0
        jobs, self._between = self._between, []
        self._free.sort()
        for number in list(self._waiting)[:room]:
            job = self._waiting.pop(number)
            job.row = self._free.pop(0)
            try:
                job.frame = self.framing.first(job.request)
            except Exception as error:  # of a framing that is not ftk's
                self._report_error(job, error)
            else:
                jobs.append(job)
        frames, asked = [job.frame for job in jobs], [(job.request, job.answers) for job in jobs]
        try:
            first = self.decoder.read([job.row for job in jobs], frames, asked) if jobs else ()  # [N, V]
            read = list(zip(jobs, first, strict=True))
        except Exception:  # of a model or framing that is not ftk's; who is at fault shows alone
            read = self._read_one_by_one(jobs)
        places: dict[int, list[int]] = {}
        for place, (job, _) in enumerate(read):
            places.setdefault(id(job.strategy), []).append(place)
        begun: list[_Group] = []
        for own in places.values():
            logits = torch.stack([read[place][1] for place in own])
            begun += self._begin([read[place][0] for place in own], logits[:, None])
        for group in begun:
            self._collect(group)
        return True

    def _read_one_by_one(self, jobs: list[_Job]) -> list[tuple[_Job, Tensor]]:
        """Those of the requests whose frames can be read, each with the logits [V] of its first token."""
        read = []
        for job in jobs:
            try:
                read.append((job, self.decoder.read([job.row], [job.frame], [(job.request, job.answers)])[0]))
            except Exception as error:
                self._report_error(job, error)
        return read

    def _begin(self, jobs: list[_Job], logits: Tensor) -> list[_Group]:
        """The groups in which these begin an answer, with logits [N, 1, V] of its first token."""
        try:
            group = self._group(jobs)
        except Exception as error:  # of a search or processor that is not ftk's
            if len(jobs) > 1:
                return [group for place, job in enumerate(jobs) for group in self._begin([job], logits[place, None])]
            self._report_error(jobs[0], error)
            return []
        self._groups.append(group)
        return [group] if self._take(group, logits) else []

    def _group(self, jobs: list[_Job]) -> _Group:
        """A search for the answers that these begin."""
        strategy, device = jobs[0].strategy, self.decoder.device
        observer = self.decoder.observer if strategy.target.observer is not None else None
        task = Task(
            len(jobs),
            self.framing.ends,
            device,
            self._uniforms(jobs),
            [job.frame.context for job in jobs],
            [job.frame.number for job in jobs],
            None if observer is None else observer.of(index_of([job.row for job in jobs], device)),
            self.decoder.fusion,
        )
        processors = PerRequest([job.request.processors for job in jobs])
        record = None if self.decoder.fusion is None else LanguageModelRecord(self.framing.ends)
        return _Group(strategy.build(task, processors), jobs, processors, record, device)

    def _uniforms(self, jobs: Sequence[_Job]) -> Tensor | None:
        """float64 [N, max_len, D]: the random numbers of the requests' next answers; None where none are drawn."""
        strategy = jobs[0].strategy
        draws = strategy.draws(len(self.framing.ends))
        if draws == 0:
            return None
        max_len = strategy.config.max_len
        numbers = [
            step_numbers([prompt_key(job.request.seed, job.frame.context)], job.frame.number, max_len, draws)
            for job in jobs
        ]
        return torch.from_numpy(np.concatenate(numbers)).to(self.decoder.device)

    def _advance(self) -> None:
        """One more token in all groups."""
        num_rows = 1 + max(job.row for group in self._groups for job in group.jobs)
        first, width = self._groups[0], self.decoder.width
        alone = len(self._groups) == 1 and first.rows == list(range(num_rows)) and first.width == width
        tokens, sources = first.move if alone else self._moves(num_rows)
        try:
            if sources is not None:
                self.decoder.reorder(sources)
            logits = self.decoder.step(tokens)  # [R, W, V]
        except Exception as error:  # e.g. out of memory: the content of the rows is undefined
            for group in list(self._groups):
                self._fail(group, dict.fromkeys(range(len(group.jobs)), error))
            return
        self.num_steps += 1
        going = []
        for group in list(self._groups):
            own = logits if alone else logits[group.index]
            if self._take(group, own if group.width == width else own[:, : group.width]):
                going.append(group)
        for group in going:  # when all have their work: to collect is to wait for the device
            self._collect(group)
        if not self._waiting and self.decoder.observer is None:
            self._close_up()

    def _take(self, group: _Group, logits: Tensor) -> bool:
        """Gives a group logits [N, 1 or W, V] of its rows; requests that fail over it leave. False if none stays."""
        try:
            group.advance(logits)
        except Exception as error:  # of a search or processor that is not ftk's: the other groups continue
            self._fail(group, dict.fromkeys(range(len(group.jobs)), error))
        else:
            self._fail(group, group.processors.failed)
        return bool(group.jobs)

    def _moves(self, num_rows: int) -> Move:
        """The moves of all groups, each in its rows; a narrower one leaves the other hypotheses where they are."""
        for group in self._groups:
            if group.width == self.decoder.width:
                self._tokens[group.index] = group.move.tokens
            else:
                self._tokens[group.index, : group.width] = group.move.tokens
        if all(group.move.sources is None for group in self._groups):
            return Move(self._tokens[:num_rows], None)
        sources = self._own_places[:num_rows].clone()
        for group in self._groups:
            if group.move.sources is not None:
                sources[group.index, : group.width] = group.move.sources
        return Move(self._tokens[:num_rows], sources)

    def _collect(self, group: _Group) -> None:
        """Takes the answers that are complete; their rows continue with the next one, or become free."""
        try:
            if any(job.request.stream for job in group.jobs):
                self._report_tokens(group)
            places = self._finished(group)
            answers = group.answers(places)
        except Exception as error:  # of a search that is not ftk's: the other groups continue
            self._fail(group, dict.fromkeys(range(len(group.jobs)), error))
            return
        for place, own in zip(places, answers, strict=True):
            self._answered(group.jobs[place], own)
        self._drop(group, places, free=False)

    def _answered(self, job: _Job, answers: Sequence[Answer]) -> None:
        """A request has the answer that it is at, the best of these."""
        try:
            answer = _best(job, answers)
            job.answers.append(answer)
            frame = self.framing.next(job.request, job.answers)
        except Exception as error:  # logits that are not finite, processors
            self._report_error(job, error)
            return
        told, number, job.num_told, job.ended = job.num_told, job.frame.number, 0, False
        rest = answer.tokens[told:], answer.token_logprobs[told:]
        self._events.append(Event(job.number, "answer", number, *rest, answer))
        if frame is None:
            self._free.append(job.row)
            self._events.append(Event(job.number, "done"))
        else:
            job.frame = frame
            self._between.append(job)

    def _report_tokens(self, group: _Group) -> None:
        """What a step has settled. Where hypotheses compete nothing is."""
        newest = group.search.newest()  # [2, N]
        if newest is None:
            return
        failed: dict[int, Exception] = {}
        for place, (job, token, logprob) in enumerate(zip(group.jobs, *newest.tolist(), strict=True)):
            if not math.isfinite(logprob):
                failed[place] = not_finite()
            job.ended = job.ended or token in self.framing.ends  # a row that has ended goes on with anything
            if job.request.stream and not job.ended and place not in failed:
                job.num_told += 1
                self._events.append(Event(job.number, "token", job.frame.number, [int(token)], [logprob]))
        self._fail(group, failed)

    def _finished(self, group: _Group) -> list[int]:
        """Places of the requests that are to leave their group now."""
        places = range(len(group.jobs))
        if not places or group.num_steps == group.jobs[0].strategy.num_steps:
            return list(places)
        # The same steps for all groups, so that they wait for the device together. Who streams waits in each step.
        check_every = 1 if any(job.request.stream for job in group.jobs) else self.check_every
        if self.num_steps % check_every:
            return []
        return [place for place, done in zip(places, group.search.finished().tolist(), strict=True) if done]

    def _fail(self, group: _Group, errors: Mapping[int, Exception]) -> None:
        """The requests at these places of a group fail."""
        for place, error in errors.items():
            self._report_error(group.jobs[place], error)
        self._drop(group, list(errors), free=False)

    def _report_error(self, job: _Job, error: Exception) -> None:
        self._events.append(Event(job.number, "error", job.frame.number, error=error))
        self.decoder.leave([job.row])
        self.decoder.wipe([job.row])
        self._free.append(job.row)

    def _drop(self, group: _Group, places: Collection[int], *, free: bool) -> None:
        """The requests at these places leave their group, and if `free` also their rows."""
        if not places:
            return
        rows = [group.jobs[place].row for place in places]
        self.decoder.leave(rows)
        if free:
            self._free.extend(rows)
        try:
            group.keep([place for place in range(len(group.jobs)) if place not in places])
        except Exception as error:  # of a search that is not ftk's: those that stay fail with it
            for job in group.jobs:
                self._report_error(job, error)
            group.jobs = []
        if not group.jobs:
            self._groups.remove(group)

    def _close_up(self) -> None:
        """Rows that will stay free are filled from behind, so that a step computes fewer rows."""
        for group in self._groups:
            for job in group.jobs:
                target = min(self._free, default=job.row)
                if target < job.row and job.row >= self.decoder.num_rows - len(self._free):
                    self.decoder.move(job.row, target)
                    self._free.remove(target)
                    self._free.append(job.row)
                    job.row = target
                    group.move_rows()


def engine_for(
    model: Any,
    framing: Framing,
    requests: Sequence[Request],
    batch_size: int,
    language_model: LanguageModel | None = None,
    *,
    enter_after_steps: int = PATIENCE,
) -> Engine:
    """An engine just large enough for some requests, of which `batch_size` are answered at once.

    Args:
        model: answers them.
        framing: reads them.
        requests: one or more.
        batch_size: rows at most.
        language_model: its log-probabilities are added to the model's.
        enter_after_steps: as for `Engine`.

    Raises:
        UserError: their options are not allowed.
    """
    strategies = [strategy(options) for options in {id(one.options): one.options for one in requests}.values()]
    num_rows = min(batch_size, len(requests))
    width, branch = max(one.width for one in strategies), max(one.num_steps for one in strategies) - 1
    slots = max(map(framing.slots, requests))
    observers = [one.target.observer for one in strategies if one.target.observer is not None]
    observer = observers[0](num_rows, slots) if observers else None
    own = CachedDecoder(model, num_rows, width, slots, branch, observer)
    decoder: Decoder = own
    if language_model is not None:
        others = max(map(language_model.slots, requests))
        other = CachedDecoder(language_model.model, num_rows, width, others, branch)
        decoder = FusedDecoder(own, other, language_model)
    return Engine(decoder, framing, enter_after_steps=enter_after_steps)


@dataclass(eq=False)
class _Job:
    """A request on its way."""

    number: int
    request: Request
    strategy: Strategy
    answers: list[Answer] = field(default_factory=list)
    row: int = -1  # of the decoder, once it has entered
    frame: Frame = _NOTHING  # of the present answer
    num_told: int = 0  # tokens of it that were reported
    ended: bool = False  # whether its end token has come


class _Group:
    """Requests that began an answer together."""

    def __init__(
        self,
        search: Search,
        jobs: list[_Job],
        processors: PerRequest,
        record: LanguageModelRecord | None,
        device: torch.device,
    ) -> None:
        self.search = search
        self.jobs = jobs
        self.processors = processors
        self.record = record
        self.width = jobs[0].strategy.width
        self.num_steps = 0
        self.device = device
        self.move_rows()

    def advance(self, logits: Tensor) -> None:
        """logits [N, 1 or W, V] of its rows"""
        self.move = self.search.advance(logits)
        if self.record is not None:
            self.record.add(logits, self.move)
        self.num_steps += 1

    def answers(self, places: Sequence[int]) -> list[list[Answer]]:
        """Of the requests at `places`, which are finished, the answers that were found, best first."""
        if not places:
            return []
        found = self.search.answers()
        own = [self.search.likeliest.given_to(found[place], place) for place in places]
        if self.record is None:
            return own
        return [self.record.given_to(answers, place) for answers, place in zip(own, places, strict=True)]

    def keep(self, places: list[int]) -> None:
        """Of its requests only those at `places` stay."""
        self.jobs = [self.jobs[place] for place in places]
        if not self.jobs:
            return
        index = index_of(places, self.device)
        self.search.keep(index)
        if self.record is not None:
            self.record.keep(index)
        tokens, sources = self.move
        self.move = Move(tokens[index], None if sources is None else sources[index])
        self.move_rows()

    def move_rows(self) -> None:
        """Its requests have come, or gone, to other rows."""
        self.rows = [job.row for job in self.jobs]
        self.index = index_of(self.rows, self.device)


def _best(job: _Job, answers: Sequence[Answer]) -> Answer:
    """The best answer of those that were found, with the others."""
    if not answers:
        raise UserError("the model gives no token a probability above 0; its weights may hold NaN")
    best, *others = (_cut(job, answer) for answer in answers)
    if not math.isfinite(best.score):
        raise not_finite()
    return dataclasses.replace(best, others=tuple(others))


def _cut(job: _Job, answer: Answer) -> Answer:
    """The answer without what processors do not count: what stands behind a stop string."""
    length = job.request.processors.length(job.frame.number, answer.tokens)
    if length == len(answer.tokens):
        return answer
    names = ("tokens", "token_logprobs", "alternatives", "lm_logprobs")
    parts = {name: getattr(answer, name)[:length] for name in names}
    return dataclasses.replace(answer, end=None, num_scored=len(answer.token_logprobs), **parts)
