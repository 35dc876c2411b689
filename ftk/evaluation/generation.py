"""Generated answers against references, by registered scorers: summaries, translations, answers to questions."""

from __future__ import annotations

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
    source: str = field(default="source", metadata={"help": "field with the text that is answered"})
    target: str = field(default="target", metadata={"help": "field with the right answer, or a list of such"})
    scoring: list[str] = field(
        default_factory=lambda: ["exact_match", "token_f1"], metadata={"help": "scorers of the answers"}
    )
    expected: str = field(
        default=SENTENCE, metadata={"help": "what a model with several masks is asked for", "choices": EXPECTED}
    )
    cut: bool = field(
        default=True,
        metadata={"help": "cut sources for which the model has no positions at their left; else refuse"},
    )

    def validate(self) -> Iterator[str]:
        if not self.scoring:
            yield "scoring is empty; it must name a scorer"
        for name in self.scoring:
            if name.split()[0] not in SCORERS:
                yield f"scoring is {name!r}; there are: {', '.join(SCORERS.names())}"


class Source(NamedTuple):
    """A row as the model reads it.

    Attributes:
        row, number: where it comes from.
        references: right answers.
        request: to the engine.
        truncated: whether the source was cut.
    """

    row: Row
    number: int
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
        return [self._question(number, row, generator) for number, row in enumerate(rows_of(path, limit))]

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
                        "place": one.row.place,
                        "prompt": one.row.get(self.config.source),
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

    def settings(self, generator: TextGenerator[Any]) -> dict[str, Any]:
        signatures = [scorer.signature() for scorer in self.scorers.values()]
        return {
            **super().settings(generator),
            "signatures": list(filter(None, signatures)),
            "generation": {name: value for name, value in vars(generator.config).items() if value is not None},
        }

    def _question(self, number: int, row: Row, generator: TextGenerator[Any]) -> Source:
        text, framing, config = row.text(self.config.source), generator.framing, generator.config
        references = row.get(self.config.target, (str, list))
        references = [references] if isinstance(references, str) else references
        if not references or not all(isinstance(one, str) and one.strip() for one in references):
            row.refuse(self.config.target, "holds an empty answer; write a text, or remove the row")
        request = Request(self._prompt(text, generator), config, seed=config.seed)
        if generator.steering is not None:
            request.processors = generator.steering.processors
        ids, truncated = generator.tokenizer.encode(text), False
        while self.config.cut and (excess := _excess(framing, request)) > 0 and len(ids) > excess:
            ids, truncated = ids[excess:], True
            request.prompt = self._prompt(ids, generator)
        try:
            framing.check(request)
        except UserError as error:
            raise UserError(f"{row.place}: {error}") from None
        return Source(row, number, references, request, truncated)

    def _prompt(self, text: str | list[int], generator: TextGenerator[Any]) -> Any:
        """The prompt of a text or its ids; a model that learned to answer texts is asked as it learned it."""
        framing, tokenizer = generator.framing, generator.tokenizer
        if hasattr(framing, "ask_text"):
            return framing.ask_text(text if isinstance(text, str) else tokenizer.decode(text), "")[0]
        return framing.ask(tokenizer.encode(text) if isinstance(text, str) else text, (), self.config.expected)


def _excess(framing: Any, request: Request) -> int:
    """Tokens of a prompt that are too many for a model, if an answer of the greatest length counts as part of it."""
    limit: int | None = getattr(framing, "max_positions", None)
    frame = framing.first(request)
    return 0 if limit is None else len(frame.tokens) + len(frame.source) + request.options.max_len - limit


def metrics_of(line: str, scorer: Scorer) -> list[Metric]:
    """The numbers of a scorer over records.

    Args:
        line: by which `build_scorer` makes it. Where it is no function of sums, one of its kind takes all answers at
            once, each with its first reference.
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
            fresh.add(record["chosen"], record["references"][0])
        return fresh.result()

    def over(name: str, records: Group) -> float:
        return results(records).get(name, math.nan)

    names = results([{"chosen": "a", "references": ["a"]}])
    return [Metric(name, over=functools.partial(over, name)) for name in names]
