"""Continuous batching: requests are submitted, and each step lets some enter a decoder's rows or writes one token."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Generator, Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.freed_memory import keep_freed_blocks
from ftk.generation.config import GenerationConfig
from ftk.generation.engine.decoder import Decoder
from ftk.generation.engine.fusion import LanguageModelRecord
from ftk.generation.engine.group import Group, Job, best
from ftk.generation.engine.request import Event, Framing, Request, check_ids, check_source
from ftk.generation.engine.scoring import Scored, score
from ftk.generation.processors.base import index_of
from ftk.generation.processors.per_request import PerRequest
from ftk.generation.search import Answer, Move, SearchTask, Strategy, not_finite
from ftk.generation.search import strategy as strategy_of
from ftk.generation.search.random import prompt_key, step_numbers
from ftk.modules.evaluation_mode import changing_shapes, evaluation_mode

CHECK_EVERY = 8
"""Steps between two checks on a GPU of which answers are complete: each check waits for the device."""

STEP_BYTES = 31 << 20
"""Freed blocks up to this size are kept for the next step on a CPU; glibc's limit is 32 MiB."""

ENTER_TOGETHER = 4
"""Requests enter once a quarter of the rows is free, see `enter_after_steps`. Few at a time mean many passes that read
a prompt and write no token, many at a time mean rows without work."""

ONE_BY_ONE = ("seed", "batch_size", "min_len", "max_len")
"""Options in which requests of one search may differ, lengths if it lets others join."""

MAX_STRATEGIES = 64
"""Sets of options that an engine remembers, so that later requests with the same options share searches."""


class Engine:
    """Answers requests in the rows of one decoder: first come, first served.

    Rows that begin an answer at the same time with the same options are a group with a search of its own, which others
    join where the search allows it (greedy search, sampling); all groups share each step of the decoder. In fp32 a
    request's answers do not depend on rows, groups and neighbours. A request that fails (a processor raises, a logit is
    not finite) fails alone; where a search fails, all requests of its group fail. Memory and width are the decoder's,
    made once.

        for event in engine.events(requests): ...  # or, with requests that come at any time and models in eval mode:

        number = engine.submit(Request(prompt))
        while engine.is_busy:
            for event in engine.step(): ...

    Args:
        decoder: of this engine alone.
        framing: how prompts are read.
        enter_after_steps: steps that a request may wait, with a row free, for others to enter with it; 0: none. No
            request waits where all can enter. Counted in steps, not in time: all ranks must decide the same.
        read_at_once: tokens of frames that a step reads at most, unless it reads one frame alone; where more could
            be read, what is being written gets a step in between.

    Attributes:
        was_interrupted: whether Ctrl-C came within a step; what the rows hold is not known then.
    """

    was_interrupted = False

    def __init__(
        self, decoder: Decoder, framing: Framing, *, enter_after_steps: int = 0, read_at_once: float = math.inf
    ) -> None:
        self.decoder = decoder
        self.framing = framing
        self.enter_after_steps, self.read_at_once = enter_after_steps, read_at_once
        self.quorum = -(-decoder.num_rows // ENTER_TOGETHER)
        self.check_every = 1 if decoder.device.type == "cpu" else CHECK_EVERY
        if decoder.device.type == "cpu":
            keep_freed_blocks(STEP_BYTES)
        self.num_steps = 0  # of the decoder
        self.entered: dict[int, int] = {}  # requests that got a row in the last step -> tokens taken over, not read
        self._numbers = itertools.count()
        self._strategies: dict[tuple[Any, ...], Strategy] = {}  # the one used last stands last
        self._waiting: dict[int, Job] = {}  # in the order of their arrival
        self._between_answers: list[Job] = []  # have a row and an answer, and will begin another
        self._groups: list[Group] = []
        self._free = list(range(decoder.num_rows))
        self._held = 0  # steps since something could have entered
        self._read_was_cut = False  # whether the last step read less than it could
        self._events: list[Event] = []
        shape = (decoder.num_rows, decoder.width)
        self._tokens = torch.zeros(shape, dtype=torch.int64, device=decoder.device)
        self._own_places = torch.arange(decoder.width, device=decoder.device).expand(shape)

    def submit(self, request: Request) -> int:
        """Adds a request behind those that wait.

        Returns:
            its number, by which its events name it.

        Raises:
            UserError: its options are not allowed, the model cannot answer it or does not know one of its tokens, or
                this engine is too small for it.
        """
        strategy, kind = self._strategy(request.options)
        self.framing.check(request)
        frame = self.framing.first(request)
        check_ids(self.decoder.models[0], frame.tokens[frame.own :])
        check_source(self.decoder.models[0], frame.source)
        self._check_size(request, strategy, len(frame.source))
        number = next(self._numbers)
        self._waiting[number] = Job(number, request, strategy, frame, kind=kind)
        return number

    @torch.inference_mode()
    @changing_shapes()
    def step(self) -> list[Event]:
        """Lets requests enter and begin their answers, or else writes one more token of each; returns what happened."""
        jobs = self._entering()
        if jobs:
            frames, asked = [job.frame for job in jobs], [(job.request, job.answers) for job in jobs]
            try:
                first = self.decoder.read([job.row for job in jobs], frames, asked, self._free)  # [N, V]
            except Exception:  # of a model or framing that is not ftk's; one by one shows which request fails
                self._begin_groups(self._read_one_by_one(jobs))
            else:
                self._begin_groups(list(zip(jobs, first, strict=True)))
        elif self._groups:
            tokens, sources = self._next_move()
            try:
                if sources is not None:
                    self.decoder.reorder(sources)
                logits = self.decoder.step(tokens)  # [R, W, V]
            except Exception as error:  # e.g. out of memory: the content of the rows is undefined
                for group in list(self._groups):
                    self._fail(group, dict.fromkeys(range(len(group.jobs)), error))
            else:
                self._advance(logits)
        events, self._events = self._events, []
        return events

    @property
    def is_busy(self) -> bool:
        """Whether a further step would do anything."""
        return bool(self._waiting or self._between_answers or self._groups or self._events)

    @property
    def num_waiting(self) -> int:
        """Requests that have no row yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self.decoder.num_rows - len(self._free)

    @torch.inference_mode()
    def cancel(self, number: int) -> int:
        """Drops a request; there are no further events of it. A number that is unknown, or done, changes nothing.

        Returns:
            how many tokens it has written that no event has reported.
        """
        num_unreported = 0
        self._events = [event for event in self._events if event.request != number]
        self._waiting.pop(number, None)
        for job in [job for job in self._between_answers if job.number == number]:
            self._between_answers.remove(job)
            self.decoder.abandon([job.row])
            self._free.append(job.row)
        for group in list(self._groups):
            places = [place for place, job in enumerate(group.jobs) if job.number == number]
            for job in [group.jobs[place] for place in places]:
                num_unreported += group.num_steps - job.start - len(job.reported)
            self._drop(group, places, free=True)
        return num_unreported

    def events(self, requests: Sequence[Request], *, stream: bool = False) -> Generator[Event, None, None]:
        """Answers requests, alone with the engine: gives their events as they come.

        Requests with the most work enter first, so that few rows are without work at the end. The models are in
        evaluation mode until the iterator ends. Closing it drops the requests that are not answered.

        Args:
            stream: whether the tokens of all are reported one by one; else those of requests that ask for it.

        Yields:
            events whose `request` is the place among `requests`.

        Raises:
            Exception: the error of a request that fails; as `submit`.
        """
        places: dict[int, int] = {}  # number -> place
        try:
            for place in sorted(range(len(requests)), key=lambda n: self.framing.work(requests[n]), reverse=True):
                request = dataclasses.replace(requests[place], stream=True) if stream else requests[place]
                places[self.submit(request)] = place
            with evaluation_mode(*self.decoder.models):
                while self.is_busy:
                    for event in self.step():
                        if event.error is not None:
                            raise event.error
                        yield event._replace(request=places[event.request])
        except KeyboardInterrupt:
            self.was_interrupted = True
            raise
        finally:
            for number in places:
                self.cancel(number)

    def answers(
        self, requests: Sequence[Request], progress: Callable[[int], object] | None = None
    ) -> list[list[Answer]]:
        """The answers of each request; as `events`, see `collect`."""
        return collect(self.events(requests), len(requests), progress)

    def score(self, requests: Sequence[Request], continuations: Sequence[Sequence[Any]]) -> list[list[Scored]]:
        """Log-probabilities of given continuations; see `ftk.generation.engine.scoring.score`."""
        return score(self.decoder.models[0], self.framing, requests, continuations)

    def _strategy(self, options: GenerationConfig) -> tuple[Strategy, Hashable]:
        """One object for all requests with these options, and one for those that differ in lengths alone."""
        # As text: an option of a plugin may be a list.
        kind = (type(options), repr([item for item in vars(options).items() if item[0] not in ONE_BY_ONE]))
        key = (kind, options.min_len, options.max_len)
        strategy = self._strategies.pop(key, None) or strategy_of(options)
        self._strategies[key] = strategy
        if len(self._strategies) > MAX_STRATEGIES:
            del self._strategies[next(iter(self._strategies))]
        return strategy, kind

    def has_room(self, request: Request) -> bool:
        """Whether the memory that was made with the decoder is enough for a request."""
        try:
            self._check_size(request, self._strategy(request.options)[0], len(self.framing.first(request).source))
        except UserError:
            return False
        return True

    def _check_size(self, request: Request, strategy: Strategy, num_source_tokens: int) -> None:
        """Refuses what does not fit the memory that was made with the decoder."""
        decoder, slots = self.decoder, self.framing.slots(request)
        if num_source_tokens > decoder.source_capacity:
            raise UserError(
                f"the source has {num_source_tokens} tokens, but the engine was made for {decoder.source_capacity}; "
                "shorten it"
            )
        if strategy.width > decoder.width:
            option = "beam" if strategy.width == request.options.beam else "nbest"
            raise UserError(
                f"{option} is {strategy.width}, but the engine was made for {decoder.width} hypotheses; lower {option}"
            )
        if strategy.num_steps - 1 > decoder.branch_capacity:
            raise UserError(
                f"max_len is {request.options.max_len}, but the engine was made for answers of "
                f"{decoder.branch_capacity + 1 - strategy.target.lookahead} tokens; lower max_len"
            )
        if slots > decoder.prefix_capacity:
            raise UserError(
                f"the prompt with its answers takes {slots} places, but the engine was made for "
                f"{decoder.prefix_capacity}; shorten it"
            )
        if strategy.target.observer is not None and decoder.observer is None:
            raise UserError(f"the engine was made without hidden states, which {request.options.strategy} search needs")

    def _entering(self) -> list[Job]:
        """The requests that read a frame now: those between two answers, and new ones if they need not wait longer."""
        self.entered = {}
        room = min(len(self._free), len(self._waiting))
        count = room + len(self._between_answers)
        if count == 0:
            return []
        was_cut, self._read_was_cut = self._read_was_cut, False
        if self._groups and was_cut:
            return []
        if self._groups and room < len(self._waiting) and count < self.quorum and self._held < self.enter_after_steps:
            self._held += 1
            return []
        self._held = 0
        self._free.sort()
        ready = [*self._between_answers, *itertools.islice(self._waiting.values(), room)]
        sizes = itertools.accumulate(len(job.frame.tokens) + len(job.frame.source) for job in ready)
        jobs = ready[: max(1, sum(size <= self.read_at_once for size in sizes))]
        self._read_was_cut, self._between_answers = len(jobs) < count, self._between_answers[len(jobs) :]
        for job in jobs:
            if self._waiting.pop(job.number, None) is not None:
                job.row = self._free.pop(0)
                self.entered[job.number] = 0
        return jobs

    def _read_one_by_one(self, jobs: list[Job]) -> list[tuple[Job, Tensor]]:
        """The requests whose frames can be read, each with the logits [V] of its first token."""
        read = []
        for job in jobs:
            try:
                asked = [(job.request, job.answers)]
                read.append((job, self.decoder.read([job.row], [job.frame], asked, self._free)[0]))
            except Exception as error:
                self._report_error(job, error)
        return read

    def _begin_groups(self, read: Sequence[tuple[Job, Tensor]]) -> None:
        """Requests begin an answer, each with the logits [V] of its first token; equal options share a group."""
        by_options: dict[int, list[tuple[Job, Tensor]]] = {}
        for job, logits in read:
            if job.number in self.entered:
                self.entered[job.number] = int(self.decoder.reused[job.row])
            by_options.setdefault(id(job.strategy), []).append((job, logits))
        begun: list[Group] = []
        for pairs in by_options.values():
            begun += self._begin([job for job, _ in pairs], torch.stack([logits for _, logits in pairs])[:, None])
        for group in begun:
            self._collect(group)
        for group in begun:
            self._join(group)

    def _begin(self, jobs: list[Job], logits: Tensor) -> list[Group]:
        """The groups in which these begin an answer, with logits [N, 1, V] of its first token."""
        try:
            group = self._group(jobs)
        except Exception as error:  # of a search or processor that is not ftk's
            if len(jobs) > 1:
                return [group for place, job in enumerate(jobs) for group in self._begin([job], logits[place, None])]
            self._report_error(jobs[0], error)
            return []
        self._groups.append(group)
        return [group] if self._advance_group(group, logits) else []

    def _join(self, group: Group) -> None:
        """Lets a group that has just begun join an older one, if one takes it."""
        for other in self._groups:
            if other is group or not group.jobs:
                return
            if other.takes(group):
                jobs = [*other.jobs, *group.jobs]
                self._groups.remove(group)
                try:
                    other.join(group)
                except Exception as error:  # e.g. out of memory
                    for job in jobs:
                        self._report_error(job, error)
                    self._groups.remove(other)
                return

    def _group(self, jobs: list[Job]) -> Group:
        """A search for the answers that these begin."""
        strategy, device = jobs[0].strategy, self.decoder.device
        for job in jobs:
            job.start = 0
        observer = self.decoder.observer if strategy.target.observer is not None else None
        task = SearchTask(
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
        record = None if self.decoder.fusion is None else LanguageModelRecord(self.framing.ends, device)
        return Group(strategy.build(task, processors), jobs, processors, record, device)

    def _uniforms(self, jobs: Sequence[Job]) -> Tensor | None:
        """float64 [N, max_len, D]: the random numbers of the requests' next answers; None where none are drawn."""
        strategy = jobs[0].strategy
        draws = strategy.draws(len(self.framing.ends))
        if draws == 0:
            return None
        max_len = strategy.config.max_len
        numbers = [
            step_numbers(
                [prompt_key(job.request.seed, [*job.frame.source, *job.frame.context])],
                job.frame.number,
                max_len,
                draws,
            )
            for job in jobs
        ]
        return torch.from_numpy(np.concatenate(numbers)).to(self.decoder.device)

    def _advance(self, logits: Tensor) -> None:
        """Gives each group its part of the logits [R, W, V] of a step, and takes the answers that are complete."""
        self.num_steps += 1
        width, is_only_group = self.decoder.width, self._is_only_group(len(logits))
        unfinished = []
        for group in list(self._groups):
            part = logits if is_only_group else logits[group.index]  # [N, W, V]
            if self._advance_group(group, part if group.width == width else part[:, : group.width]):
                unfinished.append(group)
        for group in unfinished:  # after all groups have their work: collecting waits for the device
            self._collect(group)
        if not self._waiting and self.decoder.observer is None:
            self._compact_rows()

    def _is_only_group(self, num_rows: int) -> bool:
        """Whether one group fills these rows in their order, so that nothing has to be picked."""
        group = self._groups[0]
        return len(self._groups) == 1 and group.rows == list(range(num_rows)) and group.width == self.decoder.width

    def _advance_group(self, group: Group, logits: Tensor) -> bool:
        """Gives a group the logits [N, 1 or W, V] of its rows; requests that fail leave. False if none is left."""
        try:
            group.advance(logits)
        except Exception as error:  # of a search or processor that is not ftk's: the other groups continue
            self._fail(group, dict.fromkeys(range(len(group.jobs)), error))
        else:
            self._fail(group, group.processors.failed)
        return bool(group.jobs)

    def _next_move(self) -> Move:
        """The moves of all groups, each in its rows; a narrower group leaves the other hypotheses where they are."""
        num_rows = 1 + max(job.row for group in self._groups for job in group.jobs)
        if self._is_only_group(num_rows):
            return self._groups[0].move
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

    def _collect(self, group: Group) -> None:
        """Takes the answers that are complete; their rows continue with the next answer, or become free."""
        try:
            if any(job.request.stream for job in group.jobs):
                self._report_tokens(group)
            places = self._finished(group)
            answers = group.answers(places)
        except Exception as error:  # of a search that is not ftk's: the other groups continue
            self._fail(group, dict.fromkeys(range(len(group.jobs)), error))
            return
        for place, candidates in zip(places, answers, strict=True):
            self._complete_answer(group.jobs[place], candidates)
        self._drop(group, places, free=False)

    def _complete_answer(self, job: Job, answers: Sequence[Answer]) -> None:
        """The present answer of a request is complete: the best of these."""
        try:
            answer = best(job, answers)
            job.answers.append(answer)
            frame = self.framing.next(job.request, job.answers)
        except Exception as error:  # logits that are not finite, processors
            self._report_error(job, error)
            return
        reported, number, job.reported, job.ended = len(job.reported), job.frame.number, [], False
        rest = answer.tokens[reported:], answer.token_logprobs[reported:]
        self._events.append(Event(job.number, "answer", number, *rest, answer))
        if frame is None:
            self.decoder.keep(job.row, answer.tokens)
            self._free.append(job.row)
            self._events.append(Event(job.number, "done"))
        else:
            job.frame = frame
            self._between_answers.append(job)

    def _report_tokens(self, group: Group) -> None:
        """Reports the tokens that a step has settled; none while hypotheses compete."""
        newest = group.search.newest()  # [2, N]
        if newest is None:
            return
        failed: dict[int, Exception] = {}
        for place, (job, token, logprob) in enumerate(zip(group.jobs, *newest.tolist(), strict=True)):
            if job.request.stream and not math.isfinite(logprob):
                failed[place] = not_finite()
            # Tokens after the end have no meaning.
            job.ended = job.ended or token in self.framing.ends or token in job.request.processors.stop_tokens
            if job.request.stream and not job.ended and place not in failed:
                likeliest = group.search.likeliest.behind(job.reported, place)
                job.reported.append(int(token))
                event = Event(job.number, "token", job.frame.number, [int(token)], [logprob], alternatives=likeliest)
                self._events.append(event)
        self._fail(group, failed)

    def _finished(self, group: Group) -> list[int]:
        """Places of the requests that leave their group now."""
        full = group.full()
        # The same steps for all groups, so that they wait for the device together. Streaming waits in each step.
        check_every = 1 if any(job.request.stream for job in group.jobs) else self.check_every
        if len(full) == len(group.jobs) or self.num_steps % check_every:
            return full
        done = group.search.finished().tolist()
        return [place for place, is_done in enumerate(done) if is_done or place in full]

    def _fail(self, group: Group, errors: Mapping[int, Exception]) -> None:
        """The requests at these places of a group fail."""
        for place, error in errors.items():
            self._report_error(group.jobs[place], error)
        self._drop(group, list(errors), free=False)

    def _report_error(self, job: Job, error: Exception) -> None:
        self._events.append(Event(job.number, "error", job.frame.number, error=error))
        self.decoder.leave([job.row])
        self.decoder.wipe([job.row])
        self._free.append(job.row)

    def _drop(self, group: Group, places: Collection[int], *, free: bool) -> None:
        """The requests at these places leave their group, and if `free` also their rows."""
        if not places:
            return
        rows = [group.jobs[place].row for place in places]
        self.decoder.leave(rows)
        if free:
            self.decoder.abandon(rows)
            self._free.extend(rows)
        try:
            group.keep([place for place in range(len(group.jobs)) if place not in places])
        except Exception as error:  # of a search that is not ftk's: the rest of its group fails, too
            for job in group.jobs:
                self._report_error(job, error)
            group.jobs = []
        if not group.jobs:
            self._groups.remove(group)

    def _compact_rows(self) -> None:
        """Moves requests from the last rows to free ones, so that a step computes fewer rows."""
        for group in self._groups:
            for job in group.jobs:
                target = min(self._free, default=job.row)
                if target < job.row and job.row >= self.decoder.num_rows - len(self._free):
                    self.decoder.move(job.row, target)
                    self._free.remove(target)
                    self._free.append(job.row)
                    job.row = target
                    group.move_rows()


def collect(
    events: Generator[Event, None, None], count: int, progress: Callable[[int], object] | None = None
) -> list[list[Answer]]:
    """The answers to `count` requests by their numbers, from `Engine.events`, which is closed.

    Args:
        progress: called with the number of requests that are done since the last call.
    """
    found: list[dict[int, Answer]] = [{} for _ in range(count)]
    with closing(events):
        for event in events:
            if event.answer is not None:
                found[event.request][event.number] = event.answer
            elif event.kind == "done" and progress is not None:
                progress(1)
    return [[answers[number] for number in sorted(answers)] for answers in found]
