"""Generated answers against references, by registered scorers: summaries, translations, answers to questions."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.supervised.row import Row
from ftk.data.supervised.rows import rows_of
from ftk.data.supervised.squad import ANSWER_FIELDS, NO_ANSWER
from ftk.errors import UserError
from ftk.evaluation.answers import has_words_of
from ftk.evaluation.base import Scorer, SumScorer, build_scorer, names_of
from ftk.evaluation.evaluation import Evaluation
from ftk.evaluation.few_shot import SEPARATOR, Examples, FewShotConfig
from ftk.evaluation.metrics import Group, Metric, Record
from ftk.evaluation.submission import of_answers
from ftk.generation.engine.request import EXPECTED, SENTENCE, Request
from ftk.registry import SCORERS, register_evaluation

if TYPE_CHECKING:
    from ftk.generation.search import Answer
    from ftk.generation.text import TextGenerator

QUESTIONS_AT_ONCE = 512
"""Prompts that are in an engine's queue, and in memory, together."""


@dataclass(kw_only=True)
class GenerationEvaluationConfig(FewShotConfig):
    source: str | None = option(
        None,
        "field with the text that is answered; default: the fields that the model's task asks with, "
        "source where it learned no answers",
    )
    target: str | None = option(
        None, "field with the right answer, or a list of such; default: as the model's task has it, else target"
    )
    scoring: list[str] = option(["exact_match", "token_f1"], "scorers of the answers")
    chat: bool = option(
        False,
        "ask by the chat template of the tokenizer, as the task sft does; rows may be conversations ('messages'), too",
    )
    expected: str = option(SENTENCE, "what a model with several masks is asked for", choices=EXPECTED)
    cut: bool = option(
        True,
        "cut what is too long: as the model's task does, else at the left as far as the model's positions "
        "need it; else refuse",
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if not self.scoring:
            yield "scoring is empty; it must name a scorer"
        for name in self.scoring:
            if name.split()[0] not in SCORERS:
                yield f"scoring is {name!r}; {SCORERS.hint(name.split()[0])}"


class Query(NamedTuple):
    """A question as the model reads it.

    Attributes:
        place, idx: of its row.
        text: for people.
        references: right answers; none where the row has no label.
        requests: to the engine: one, or one for each window of a text that is too long.
        truncated: whether the question was cut.
        prompt: of a text with several answers, as `TextGenerator.encode_sample` makes it; else None.
        examples: places of those in front of the question.
    """

    place: str
    idx: Any
    text: str
    references: Sequence[str]
    requests: Sequence[Request]
    truncated: bool
    prompt: Any = None
    examples: Sequence[str] = ()


@register_evaluation("generation", config=GenerationEvaluationConfig)
class GeneratedAnswers(Evaluation[Query]):
    """Answers are searched for by the generator's own options (`max_len`, `beam` ...)."""

    config: GenerationEvaluationConfig

    def __init__(self, config: GenerationEvaluationConfig) -> None:
        super().__init__(config)
        self.scorers = {line: build_scorer(line) for line in config.scoring}

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[Query]:
        rows, framing = rows_of(path, limit), self._framing(generator)
        if not hasattr(framing, "of_row"):
            examples = self._examples()
            return [
                self._plain_question(row, generator, [] if examples is None else examples.of(number, row.place))
                for number, row in enumerate(rows)
            ]
        if self.config.num_fewshot:
            raise UserError("`num_fewshot`: this model is asked about each row alone, by its template; leave it out")
        return self._task_questions(rows, framing, generator)

    def _task_questions(self, rows: Sequence[Row], framing: Any, generator: TextGenerator[Any]) -> list[Query]:
        """Rows as the model's task asks them, long ones in several windows."""
        asked = [(row, *pair) for row in rows for pair in self._questions_of_row(row, framing)]
        found, no_answer = [], framing.no_answer
        try:
            encoded = framing.encoded([question for _, question, _ in asked])
        except UserError as error:
            if not (self.config.chat and "`seq_length`" in str(error)):
                raise
            raise UserError(f"{error} (the model's positions, less `max_len`)") from None
        by_question = itertools.groupby(encoded, key=lambda question: question["number"])
        for (row, question, references), (_, windows) in zip(asked, by_question, strict=True):
            requests, was_cut, prompt = [], False, None
            for window in windows:
                if _has_several_answers(framing):
                    prompt = generator.encode_sample(window)
                    if window["was_cut"]:  # nothing is answered of what the model does not read
                        references = [window["reference"]]
                requests.append(_request(window["prompt"], generator) if prompt is None else prompt.request)
                was_cut |= window["was_cut"]
            if was_cut and not self.config.cut:
                raise UserError(f"{row.place}: the question is longer than the model's task reads; leave cut=false out")
            problem = next(filter(None, (_refusal(generator.framing, request) for request in requests)), None)
            if problem is not None:
                raise UserError(f"{row.place}: {problem}")
            # See `_best`: rows may have the text that the model learned for no answer.
            references = [NO_ANSWER if reference == no_answer else reference for reference in references]
            found.append(Query(row.place, row.idx, question.shown, references, requests, was_cut, prompt))
        return found

    def records(
        self,
        questions: Sequence[Query],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        found: list[Record] = []
        for start in range(0, len(questions), QUESTIONS_AT_ONCE):
            block = questions[start : start + QUESTIONS_AT_ONCE]
            answers = _answers(block, generator, progress)
            found += [self._record(asked, *answer, generator) for asked, answer in zip(block, answers, strict=True)]
        return found

    def _record(self, asked: Query, text: str, logprobs: Sequence[float], generator: TextGenerator[Any]) -> Record:
        frames = [generator.framing.first(request) for request in asked.requests]
        record: Record = {
            "idx": asked.idx,
            "place": asked.place,
            "prompt": asked.text,
            "chosen": text,
            "references": list(asked.references),
            "label": next(iter(asked.references), None),
            "logprob": sum(logprobs),
            "confidence": sum(logprobs) / max(1, len(logprobs)),
            "truncated": asked.truncated,
            "length": sum(len(frame.tokens) + len(frame.source) for frame in frames),
            "examples": [*asked.examples],
        }
        if asked.references:
            record["correct"] = any(has_words_of(text, reference) for reference in asked.references)
            record["scores"] = {
                line: [*scorer.measure(text, asked.references)]
                for line, scorer in self.scorers.items()
                if isinstance(scorer, SumScorer)
            }
        return record

    def metrics(self) -> list[Metric]:
        return [metric for line, scorer in self.scorers.items() for metric in metrics_of(line, scorer)]

    def settings(self, generator: TextGenerator[Any], questions: Sequence[Query] = ()) -> dict[str, Any]:
        num_references = {len(question.references) for question in questions if question.references} or {1}
        signatures = [scorer.signature(num_references) for scorer in self.scorers.values()]
        return {
            **super().settings(generator, questions),
            "signatures": list(filter(None, signatures)),
            "generation": {name: value for name, value in vars(generator.config).items() if value is not None},
        }

    def _framing(self, generator: TextGenerator[Any]) -> Any:
        """How the model is asked; without `of_row`: about plain texts."""
        if not self.config.chat:
            return generator.framing
        if generator.chat_framing is None:
            raise UserError(
                "chat=true is for causal models that ftk has not trained on answers and whose tokenizer has a chat "
                "template; leave it out"
            )
        room = generator.framing.room(Request((), generator.config)) if self.config.cut else None
        return generator.chat_framing(None if room is None else max(1, room - generator.config.max_len))

    def _questions_of_row(self, row: Row, framing: Any) -> Iterator[tuple[Any, list[str]]]:
        """The questions that the model's task makes of a row, each with the right answers."""
        target = self.config.target or "target"
        is_given = self.config.source is not None or self.config.target is not None
        if _has_several_answers(framing) and is_given:
            raise UserError("source and target: this model learned answers by fields of its own; leave them out")
        if _has_several_answers(framing) or not (is_given or isinstance(row.values.get(target), list)):
            yield from ((question, [question.answer]) for question in framing.of_row(row))
            return
        references = self.references(row, target)
        stands_for = {target: references[0]} if references else dict.fromkeys(ANSWER_FIELDS, NO_ANSWER)
        row = dataclasses.replace(row, values={**row.values, **stands_for})  # a task takes one
        if self.config.source is not None:
            question = framing.of_text(row.text(self.config.source))
        else:
            *_, question = framing.of_row(row)
        yield question, references

    def references(self, row: Row, field: str) -> list[str]:
        """The right answers of a row.

        Raises:
            UserError: there is none, or one is no text.
        """
        value = row.get(field, (str, list))
        references: list[str] = [value] if isinstance(value, str) else value
        if not references or not all(isinstance(reference, str) and reference.strip() for reference in references):
            row.refuse(field, "holds an empty answer; write a text, or remove the row")
        return references

    def _examples(self) -> Examples[Row] | None:
        if self.config.fewshot_data is None:
            return None
        target = self.config.target or "target"
        return Examples(self.config, [row for row in rows_of(self.config.fewshot_data) if self.references(row, target)])

    def _plain_question(self, row: Row, generator: TextGenerator[Any], examples: Sequence[Row]) -> Query:
        """A row for a model that did not learn to answer: its source, and behind that the place of the answer."""
        framing, expected = generator.framing, self.config.expected
        source, target = self.config.source or "source", self.config.target or "target"
        is_conversation = row.find(source) is None and ("messages" in row.values or "conversations" in row.values)
        if is_conversation and generator.chat_framing is not None:
            row.refuse(source, "is missing; a conversation is asked by 'generation chat=true'")
        text, references = row.text(source), self.references(row, target)
        answered = (f"{example.text(source)} {self.references(example, target)[0]}{SEPARATOR}" for example in examples)
        ids = [token for part in (*answered, text) for token in generator.tokenizer.encode(part)]

        def cut_request(count: int) -> Request:
            return _request(framing.ask(ids[count:], (), expected), generator)

        num_cut, problem = 0, _refusal(framing, cut_request(0))
        if problem is not None and self.config.cut:
            num_cut = bisect.bisect_left(
                range(len(ids)), True, key=lambda count: _refusal(framing, cut_request(count)) is None
            )
        if problem is not None and not 0 < num_cut < len(ids):
            raise UserError(f"{row.place}: {problem}")
        shown = [example.place for example in examples]
        return Query(row.place, row.idx, text, references, [cut_request(num_cut)], num_cut > 0, examples=shown)


@dataclass(kw_only=True)
class SquadConfig(GenerationEvaluationConfig):
    target: str | None = option("answers", "field with the right answers")
    scoring: list[str] = option(["squad_em", "squad_f1"], "scorers of the answers")


@register_evaluation("squad", config=SquadConfig)
class Squad(GeneratedAnswers):
    """Questions about paragraphs, as SQuAD and CMRC 2018 have them; they may have no answers, as for tests."""

    def submission(self, records: Sequence[Record]) -> tuple[str, str]:
        return of_answers(records)

    def references(self, row: Row, field: str) -> list[str]:
        return super().references(row, field) if field in row.values else []


def _request(prompt: Any, generator: TextGenerator[Any]) -> Request:
    request = Request(prompt, generator.config, seed=generator.config.seed)
    if generator.steering is not None:
        request.processors = generator.steering.processors
    return request


def _has_several_answers(framing: Any) -> bool:
    """Whether a model learned several answers to each text: the text with all of them is what counts."""
    return getattr(framing, "has_several_answers", False)


def _answers(
    block: Sequence[Query], generator: TextGenerator[Any], progress: Callable[[int], object] | None
) -> Iterator[tuple[str, Sequence[float]]]:
    """The text that answers each question, and the log-probabilities of its tokens."""
    if _has_several_answers(generator.framing):
        for result in generator.generate_encoded([question.prompt for question in block], progress):
            yield result.text, [logprob for answer in result.answers for logprob in answer.token_logprobs]
        return
    requests = [request for question in block for request in question.requests]
    answers = iter(generator.engine(requests).answers(requests, progress))
    for question in block:
        text, best = _best(question.requests, [next(answers)[0] for _ in question.requests], generator)
        yield text, best.token_logprobs


def _best(requests: Sequence[Request], answers: Sequence[Answer], generator: TextGenerator[Any]) -> tuple[str, Answer]:
    """The answer to a question, with its text: of several windows the best by score that is an answer, if there is any.

    A model's own words for "no answer" become `NO_ANSWER`, which benchmarks and scorers know.
    """
    decode, own = generator.tokenizer.decode, getattr(generator.framing, "no_answer", None)
    # A tokenizer may spell it otherwise, such as "n / a".
    none = {decode(generator.tokenizer.encode(words)).strip() for words in (own or NO_ANSWER, NO_ANSWER)}
    if own is not None or len(requests) > 1:
        none.add("")
    texts = [
        request.processors.cut(decode(answer.tokens)).strip() for request, answer in zip(requests, answers, strict=True)
    ]
    text, answer = max(zip(texts, answers, strict=True), key=lambda pair: (pair[0] not in none, pair[1].score))
    return NO_ANSWER if text in none else text, answer


def _refusal(framing: Any, request: Request) -> UserError | None:
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

        return [Metric(name, add, functools.partial(value, name)) for name in names_of(line)]

    def results(records: Group) -> dict[str, float]:
        fresh = build_scorer(line)
        for record in records:
            fresh.add(record["chosen"], *record["references"])
        return fresh.result()

    def over(name: str, records: Group) -> float:
        return results(records).get(name, math.nan)

    return [Metric(name, over=functools.partial(over, name)) for name in names_of(line)]
