"""Cloze tasks as evaluations: BoolQ, COPA and the others by their names, and tasks of a user's own."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ftk.config.choice import name_and_options
from ftk.config.options import option, required
from ftk.data.supervised.cloze import Cloze, ClozeQuestion
from ftk.data.supervised.cloze_files import cloze_names, load_cloze
from ftk.data.supervised.rows import rows_of
from ftk.errors import UserError
from ftk.evaluation.answers import squad_em, squad_f1
from ftk.evaluation.evaluation import Evaluation
from ftk.evaluation.few_shot import SEPARATOR, Examples, FewShotConfig, num_fitting
from ftk.evaluation.metrics import Metric, Record, binary_f1, by_class, macro_f1, matthews, share, share_of_groups
from ftk.evaluation.submission import of_choices
from ftk.generation.engine.request import prompt_ids_of
from ftk.generation.questions import (
    SCORINGS,
    CandidateConfig,
    CandidateScore,
    EncodedCloze,
    check_cloze,
    chosen,
    encode_questions,
    score_questions,
    scoring_of,
)
from ftk.registry import EVALUATIONS, register_evaluation

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator
    from ftk.tokenizers.base import Tokenizer

GAP = "____"
"""What stands in the place of the answer in records."""

DEFAULT_SEQ_LENGTH = 512
"""`seq_length` for models that read texts of any length."""


@dataclass(kw_only=True)
class ClozeEvaluationConfig(CandidateConfig, FewShotConfig):
    seq_length: int | None = option(
        None, "most tokens that the model reads; default: its positions, 512 without a limit", min=1
    )


@dataclass(kw_only=True)
class AnyClozeConfig(ClozeEvaluationConfig):
    cloze: str = required("a task, or the YAML file of one of your own", path=True)


class ClozeQuery(NamedTuple):
    """A question in words and in tokens, and the places of the examples in front of it."""

    words: ClozeQuestion
    encoded: EncodedCloze
    examples: Sequence[str] = ()


class ClozeEvaluation(Evaluation[ClozeQuery]):
    """The likeliest candidate is chosen."""

    config: ClozeEvaluationConfig
    unit = "question"

    def __init__(self, config: ClozeEvaluationConfig, cloze: str) -> None:
        super().__init__(config)
        self.cloze: Cloze = load_cloze(cloze)
        try:
            self.scoring, self.end = scoring_of(self.cloze, config.candidate_scoring, config.score_end)
        except UserError as error:
            raise self._of_line(error) from None
        self._pattern = config.pattern

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[ClozeQuery]:
        framing, tokenizer = generator.framing, generator.tokenizer
        seq_length = self.seq_length(generator)
        pattern = self._pattern = self._pattern_for(generator)
        try:
            check_cloze(self.cloze, pattern, self.scoring, framing, tokenizer)
            prompts, rows = prompt_ids_of(generator.model), rows_of(path, limit)
            words = self.cloze.questions(rows, pattern, prompts=prompts, reads_behind=framing.reads_behind)
            encoded = encode_questions(
                words, framing, tokenizer, scoring=self.scoring, end=self.end, seq_length=seq_length
            )
            asked = [ClozeQuery(*pair) for pair in zip(words, encoded, strict=True)]
            if self.config.fewshot_data is not None:
                asked = [*self._with_examples(asked, tokenizer, seq_length, len(prompts.front))]
        except UserError as error:
            raise self._of_line(error) from None
        return asked

    def records(
        self,
        questions: Sequence[ClozeQuery],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        asked = [question.encoded for question in questions]
        found = score_questions(generator.model, generator.framing, asked, progress)
        return [self._record(*pair) for pair in zip(questions, found, strict=True)]

    def metrics(self) -> list[Metric]:
        labels, texts = self.classes, self.cloze.has_texts
        known: dict[str, Callable[[], Metric]] = {
            "accuracy": lambda: share("accuracy"),
            "macro_f1": lambda: by_class("macro_f1", labels, macro_f1),
            "mcc": lambda: by_class("mcc", labels, matthews),
            "f1a": lambda: by_class("f1a", labels, binary_f1),
            "em": lambda: share("em", "squad_em") if texts else share_of_groups("em", lambda own: str(own["group"])),
            "f1": lambda: share("f1", "squad_f1") if texts else by_class("f1", labels, binary_f1),
        }
        return [known[name]() for name in self.cloze.metrics or ("accuracy",)]

    @property
    def classes(self) -> Sequence[Any]:
        return [*(self.cloze.pattern_of(self._pattern).words or self.cloze.labels)]

    def settings(self, generator: TextGenerator[Any], questions: Sequence[ClozeQuery] = ()) -> dict[str, Any]:
        return {
            "cloze": self.cloze.name,
            "pattern": self._pattern_for(generator),
            "candidate_scoring": self.scoring,
            "score_end": self.end,
            "seq_length": self.seq_length(generator),
            **self.config.few_shot(),
        }

    def _pattern_for(self, generator: TextGenerator[Any]) -> int:
        return self.cloze.default_pattern(self.config.pattern, reads_behind=generator.framing.reads_behind)

    def seq_length(self, generator: TextGenerator[Any]) -> int:
        """The most tokens that a model may read."""
        limit: int | None = getattr(generator.framing, "max_positions", None)
        return self.config.seq_length or limit or DEFAULT_SEQ_LENGTH

    def submission(self, records: Sequence[Record]) -> tuple[str, str]:
        return of_choices(self.cloze.name, self.cloze.reader, records)

    def _with_examples(
        self, asked: Sequence[ClozeQuery], tokenizer: Tokenizer, seq_length: int, num_front: int
    ) -> Iterator[ClozeQuery]:
        """The questions behind as many examples as there is room for, in front of which prompt tokens stay."""
        answered = self.cloze.questions(rows_of(str(self.config.fewshot_data)), self._pattern)
        examples = Examples(self.config, [question for question in answered if question.right])
        for number, (question, own, _) in enumerate(asked):
            drawn = examples.of(number, question.place)
            ids = tokenizer.encode_batch([_answered(question) + SEPARATOR for question in drawn])
            first = len(ids) - num_fitting([*map(len, ids)], seq_length - own.num_tokens)
            shown = [*itertools.chain(*ids[first:])]
            encoded = own._replace(
                texts=tuple(((*left[:num_front], *shown, *left[num_front:]), behind) for left, behind in own.texts),
                num_tokens=own.num_tokens + len(shown),
                was_cut=own.was_cut or first > 0,
            )
            yield ClozeQuery(question, encoded, [question.place for question in drawn[first:]])

    def _of_line(self, error: UserError) -> UserError:
        """The error with options as they are written behind an evaluation's name, and a whole argument to type."""
        text = re.sub(r"`([a-z_]+)`( \w+)?", _as_option, str(error))
        offered = dict(pair.split("=") for pair in re.findall(r"use ((?:pattern|candidate_scoring)=\w+)", text))
        if not offered:
            return UserError(text)
        name = self.cloze.name if self.cloze.name in EVALUATIONS else f"cloze cloze={self.cloze.name}"
        given = {"pattern": self.config.pattern, "candidate_scoring": self.config.candidate_scoring}
        whole = {key: value for key, value in (given | offered).items() if value is not None}
        options = " ".join(f"{key}={value}" for key, value in whole.items())
        return UserError(f"{text}: `evaluation` '{name} {options}'")

    def _record(self, asked: ClozeQuery, scores: Sequence[CandidateScore]) -> Record:
        words, number = asked.words, chosen(scores)
        space = " " if any(text[:1].isspace() for text in words.candidates) else ""  # that of the candidates
        record: Record = {
            "idx": words.idx,
            "place": words.place,
            "group": words.group,
            "prompt": words.texts[0].filled(space + GAP),
            "candidates": [
                {"text": text, "label": label, "logprob": score.logprob, "score": score.score}
                for text, label, score in zip(words.candidates, words.labels, scores, strict=True)
            ],
            "chosen": words.otherwise if number is None else words.labels[number],
            "label": None,
            "truncated": asked.encoded.was_cut,
            "length": asked.encoded.num_tokens,
            "examples": [*asked.examples],
        }
        if words.right is None:
            return record
        record["label"] = words.labels[words.right[0]] if words.right else words.otherwise
        record["correct"] = number in words.right if number is not None else not words.right
        best = max((scores[number].score for number in words.right), default=scores[0].score)
        record["confidence"] = 0.0 if number is None else scores[number].score - best
        if self.cloze.has_texts:
            record["label"] = list(words.answers)
            for name, score in (("squad_em", squad_em), ("squad_f1", squad_f1)):
                record[name] = max(score(record["chosen"] or "", answer) for answer in words.answers)
        return record


@register_evaluation("cloze", config=AnyClozeConfig)
def _any_cloze(config: AnyClozeConfig) -> ClozeEvaluation:
    return ClozeEvaluation(config, config.cloze)


def options_as_trained(task: Mapping[str, Any], name: str, line: str) -> dict[str, Any]:
    """Options of an evaluation as a task had them that learned the same cloze task, or has its name; else none.

    Args:
        task: options of the task by name, and its own under `_name`.
    """
    config, trained = EVALUATIONS.get(name).config, task.get("cloze")
    if config is None or (trained is None and task.get("_name") != name):
        return {}
    is_same = trained in (None, name)
    if name == "cloze" and trained is not None:  # by name, path or content
        asked = load_cloze(name_and_options(line, "`evaluation`")[1].get("cloze", trained))
        is_same = dataclasses.replace(load_cloze(trained), name=asked.name) == asked
    if not is_same:
        return {}
    return {field.name: task[field.name] for field in dataclasses.fields(config) if task.get(field.name) is not None}


def _answered(question: ClozeQuestion) -> str:
    """The text of a question with a right candidate in its gap."""
    assert question.right, "examples have one"
    right = question.right[0]
    return question.text_of(right).filled(question.candidates[right])


def _as_option(named: re.Match[str]) -> str:
    """`pattern` 0 -> pattern=0"""
    value = (named[2] or "").strip()
    return f"{named[1]}={value}" if value in SCORINGS or value.isdecimal() else named[1] + (named[2] or "")


def _register(name: str) -> None:
    @register_evaluation(name, config=ClozeEvaluationConfig)
    def build(config: ClozeEvaluationConfig) -> ClozeEvaluation:
        return ClozeEvaluation(config, name)


for _name in cloze_names():
    _register(_name)
