"""Generated answers against references, by registered scorers: summaries, translations, answers to questions."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.data.supervised.rows import Row
from ftk.errors import UserError
from ftk.evaluation.answers import words_of
from ftk.evaluation.base import Scorer, SumScorer, build_scorer
from ftk.evaluation.evaluation import Evaluation, rows_of
from ftk.evaluation.metrics import Group, Metric, Record
from ftk.generation.engine.request import EXPECTED, SENTENCE, Request
from ftk.registry import SCORERS, register_evaluation

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator

AT_ONCE = 512
"""Prompts that are in an engine's queue, and in memory, together."""


@dataclass(kw_only=True)
class GenerationEvaluationConfig:
    source: str | None = field(
        default=None,
        metadata={
            "help": "field with the text that is answered; default: the fields that the model's task asks with, "
            "source where it learned no answers"
        },
    )
    target: str | None = field(
        default=None,
        metadata={
            "help": "field with the right answer, or a list of such; default: as the model's task has it, else target"
        },
    )
    scoring: list[str] = field(
        default_factory=lambda: ["exact_match", "token_f1"], metadata={"help": "scorers of the answers"}
    )
    expected: str = field(
        default=SENTENCE, metadata={"help": "what a model with several masks is asked for", "choices": EXPECTED}
    )
    cut: bool = field(
        default=True,
        metadata={
            "help": "cut what is too long: as the model's task does, else at the left as far as the model's positions "
            "need it; else refuse"
        },
    )

    def validate(self) -> Iterator[str]:
        if not self.scoring:
            yield "scoring is empty; it must name a scorer"
        for name in self.scoring:
            if name.split()[0] not in SCORERS:
                yield f"scoring is {name!r}; there are: {', '.join(SCORERS.names())}"


class Source(NamedTuple):
    """A question as the model reads it.

    Attributes:
        place, number: of its row.
        text: for people.
        references: right answers.
        request: to the engine.
        truncated: whether the question was cut.
    """

    place: str
    number: int
    text: str
    references: Sequence[str]
    request: Request
    truncated: bool


@register_evaluation("generation", config=GenerationEvaluationConfig)
class GeneratedAnswers(Evaluation[Source]):
    """Answers are searched for by the generator's own options (`max_len`, `beam` ...)."""

    config: GenerationEvaluationConfig

    def __init__(self, config: GenerationEvaluationConfig) -> None:
        super().__init__(config)
        self.scorers = {line: build_scorer(line) for line in config.scoring}

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[Source]:
        rows, framing = rows_of(path, limit), generator.framing
        if not hasattr(framing, "of_row"):
            return [self._plain(number, row, generator) for number, row in enumerate(rows)]
        # A model that learned to answer is asked as it learned it.
        asked = [(number, row, *one) for number, row in enumerate(rows) for one in self._learned(row, framing)]
        found = []
        encoded = framing.encoded([question for _, _, question, _ in asked])
        for (number, row, _, references), one in zip(asked, encoded, strict=True):
            if one["was_cut"] and not self.config.cut:
                raise UserError(f"{row.place}: the question is longer than the model's task reads; leave cut=false out")
            request = _request(one["prompt"], generator)
            problem = _problem(framing, request)
            if problem is not None:
                raise UserError(f"{row.place}: {problem}")
            found.append(Source(row.place, number, one["shown"], references, request, one["was_cut"]))
        return found

    def records(
        self,
        questions: Sequence[Source],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        found: list[Record] = []
        for start in range(0, len(questions), AT_ONCE):
            block = questions[start : start + AT_ONCE]
            requests = [one.request for one in block]
            answers = generator.engine(requests).answers(requests, progress)
            for one, (answer,) in zip(block, answers, strict=True):
                text = one.request.processors.cut(generator.tokenizer.decode(answer.tokens)).strip()
                right = any(words_of(text) == words_of(reference) for reference in one.references)
                found.append(
                    {
                        "idx": one.number,
                        "place": one.place,
                        "prompt": one.text,
                        "chosen": text,
                        "references": list(one.references),
                        "label": one.references[0],
                        "correct": right,
                        "scores": {
                            line: [*scorer.measure(text, one.references)]
                            for line, scorer in self.scorers.items()
                            if isinstance(scorer, SumScorer)
                        },
                        "logprob": sum(answer.token_logprobs),
                        "confidence": sum(answer.token_logprobs) / max(1, len(answer.token_logprobs)),
                        "truncated": one.truncated,
                    }
                )
        return found

    def metrics(self) -> list[Metric]:
        return [metric for line, scorer in self.scorers.items() for metric in metrics_of(line, scorer)]

    def settings(self, generator: TextGenerator[Any], questions: Sequence[Source] = ()) -> dict[str, Any]:
        num_references = {len(one.references) for one in questions} or {1}
        signatures = [scorer.signature(num_references) for scorer in self.scorers.values()]
        return {
            **super().settings(generator, questions),
            "signatures": list(filter(None, signatures)),
            "generation": {name: value for name, value in vars(generator.config).items() if value is not None},
        }

    def _learned(self, row: Row, framing: Any) -> Iterator[tuple[Any, list[str]]]:
        """The questions that the model's task makes of a row, each with the right answers."""
        target = self.config.target or "target"
        is_given = self.config.source is not None or self.config.target is not None
        if is_given or isinstance(row.values.get(target), list):
            references = _references(row, target)
            row = dataclasses.replace(row, values={**row.values, target: references[0]})  # a task takes one
            if self.config.source is not None:
                question = framing.of_text(row.text(self.config.source))
            else:
                *_, question = framing.of_row(row)
            yield question, references
        else:
            yield from ((question, [question.answer]) for question in framing.of_row(row))

    def _plain(self, number: int, row: Row, generator: TextGenerator[Any]) -> Source:
        """A row for a model that did not learn to answer: its source, and behind that the place of the answer."""
        framing, expected = generator.framing, self.config.expected
        text, references = row.text(self.config.source or "source"), _references(row, self.config.target or "target")
        ids = generator.tokenizer.encode(text)

        def without(count: int) -> Request:
            return _request(framing.ask(ids[count:], (), expected), generator)

        lost, problem = 0, _problem(framing, without(0))
        if problem is not None and self.config.cut:
            lost = bisect.bisect_left(
                range(len(ids)), True, key=lambda count: _problem(framing, without(count)) is None
            )
        if problem is not None and not 0 < lost < len(ids):
            raise UserError(f"{row.place}: {problem}")
        return Source(row.place, number, text, references, without(lost), lost > 0)


def _references(row: Row, field: str) -> list[str]:
    """The right answers of a row.

    Raises:
        UserError: there is none, or one is no text.
    """
    value = row.get(field, (str, list))
    references: list[str] = [value] if isinstance(value, str) else value
    if not references or not all(isinstance(one, str) and one.strip() for one in references):
        row.refuse(field, "holds an empty answer; write a text, or remove the row")
    return references


def _request(prompt: Any, generator: TextGenerator[Any]) -> Request:
    request = Request(prompt, generator.config, seed=generator.config.seed)
    if generator.steering is not None:
        request.processors = generator.steering.processors
    return request


def _problem(framing: Any, request: Request) -> UserError | None:
    """Why a model cannot answer a request; None: it can."""
    try:
        framing.check(request)
    except UserError as error:
        return error
    return None


def metrics_of(line: str, scorer: Scorer) -> list[Metric]:
    """The numbers of a scorer over records.

    Args:
        line: by which `build_scorer` makes it. Where it is no function of sums, one of its kind takes all answers at
            once.
        scorer: of the line; records have what it measured under `scores`.
    """
    if isinstance(scorer, SumScorer):
        own = scorer

        def add(group: Group) -> list[float]:
            return [math.fsum(parts) for parts in zip(*(record["scores"][line] for record in group), strict=True)]

        def value(name: str, sums: NDArray[np.float64]) -> float:
            return own.values(sums.tolist())[name]

        names = own.values(own.measure("a", ["a"]))
        return [Metric(name, add, functools.partial(value, name)) for name in names]

    def results(records: Group) -> dict[str, float]:
        fresh = build_scorer(line)
        for record in records:
            fresh.add(record["chosen"], *record["references"])
        return fresh.result()

    def over(name: str, records: Group) -> float:
        return results(records).get(name, math.nan)

    names = results([{"chosen": "a", "references": ["a"]}])
    return [Metric(name, over=functools.partial(over, name)) for name in names]
