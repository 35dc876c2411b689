"""Requests on their way, and the groups in which they share a search."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.engine.fusion import LanguageModelRecord
from ftk.generation.engine.request import Frame, Request
from ftk.generation.processors.base import index_of
from ftk.generation.processors.per_request import PerRequest
from ftk.generation.search import Answer, Move, Search, Strategy, not_finite
from ftk.generation.search.base import Span
from ftk.generation.search.independent import IndependentSearch


@dataclass(eq=False)
class Job:
    """A request on its way."""

    number: int
    request: Request
    strategy: Strategy
    frame: Frame  # of the present answer
    answers: list[Answer] = field(default_factory=list)
    row: int = -1  # of the decoder, once it has entered
    reported: list[int] = field(default_factory=list)  # tokens of the present answer
    ended: bool = False  # whether its end token has come
    start: int = 0  # steps of its search before the present answer
    kind: Any = None  # its options but for those in which requests of one search may differ

    @property
    def span(self) -> Span:
        return Span(self.start, self.strategy.config.min_len, self.strategy.config.max_len)


class Group:
    """Requests that write their answers together, with their search."""

    def __init__(
        self,
        search: Search,
        jobs: list[Job],
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
        """The answers that were found for the finished requests at `places`, best first."""
        if not places:
            return []
        found = self.search.answers_of(places)
        own = [self.search.likeliest.given_to(answers, place) for answers, place in zip(found, places, strict=True)]
        if self.record is None:
            return own
        return [self.record.given_to(answers, place) for answers, place in zip(own, places, strict=True)]

    def takes(self, others: Group) -> bool:
        """Whether others that have just begun an answer may join."""
        searches = self.search, others.search
        is_open = all(isinstance(search, IndependentSearch) and search.is_open() for search in searches)
        return is_open and self.jobs[0].kind == others.jobs[0].kind

    def join(self, others: Group) -> None:
        """Adds the requests of others; all stand in the order of their rows."""
        for job in others.jobs:
            job.start += self.num_steps - others.num_steps
        self.search.join(others.search)  # type: ignore[attr-defined] # see `takes`
        self.processors.join(others.processors)
        self.jobs = [*self.jobs, *others.jobs]
        self.move = Move(torch.cat((self.move.tokens, others.move.tokens)), None)
        self.keep(sorted(range(len(self.jobs)), key=lambda place: self.jobs[place].row))

    def full(self) -> list[int]:
        """Places of the requests whose answers have as many tokens as they may."""
        return [place for place, job in enumerate(self.jobs) if self.num_steps - job.start == job.strategy.num_steps]

    def keep(self, places: list[int]) -> None:
        """Only the requests at `places` stay, in this order."""
        self.jobs = [self.jobs[place] for place in places]
        if not self.jobs:
            return
        index = index_of(places, self.device)
        frames = [job.frame for job in self.jobs]
        contexts, numbers = [frame.context for frame in frames], [frame.number for frame in frames]
        spans = [job.span for job in self.jobs]
        self.search.task = self.search.task._replace(contexts=contexts, numbers=numbers, spans=spans)
        self.search.keep(index)
        self.processors.keep_requests(places, self.device)
        self.processors.spans = [*spans]
        if self.record is not None:
            self.record.keep(index)
        tokens, sources = self.move
        self.move = Move(tokens[index], None if sources is None else sources[index])
        self.move_rows()

    def move_rows(self) -> None:
        """Takes over the rows of its requests after they have changed."""
        self.rows = [job.row for job in self.jobs]
        self.index = index_of(self.rows, self.device)


def best(job: Job, answers: Sequence[Answer]) -> Answer:
    """The best of the answers that were found, with the others."""
    if not answers:
        raise UserError("the model gives no token a probability above 0; its weights may hold NaN")
    best, *others = (_cut(job, answer) for answer in answers)
    if not math.isfinite(best.score):
        raise not_finite()
    return dataclasses.replace(best, others=tuple(others))


def _cut(job: Job, answer: Answer) -> Answer:
    """The answer without what stands behind a stop string."""
    length = job.request.processors.length(job.frame.number, answer.tokens)
    if length == len(answer.tokens):
        return answer
    names = ("tokens", "token_logprobs", "alternatives", "lm_logprobs")
    parts = {name: getattr(answer, name)[:length] for name in names}
    return dataclasses.replace(answer, end=None, num_scored=len(answer.token_logprobs), **parts)
