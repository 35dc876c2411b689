"""Cloze tasks as evaluations: BoolQ, COPA and the others by their names, and tasks of a user's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ftk.data.supervised.cloze import Cloze, ClozeQuestion, Text, cloze_names, load_cloze
from ftk.errors import UserError
from ftk.evaluation.answers import SquadExactMatch, SquadF1
from ftk.evaluation.evaluation import Evaluation, rows_of
from ftk.evaluation.metrics import Metric, Record, binary_f1, macro_f1, matthews, of_confusion, share, share_of_groups
from ftk.generation.questions import (
    SCORINGS,
    CandidateScore,
    EncodedQuestion,
    check_cloze,
    chosen,
    encode_questions,
    score_questions,
    scoring_of,
)
from ftk.registry import register_evaluation

if TYPE_CHECKING:
    from ftk.generation.text import TextGenerator

GAP = " ____"
"""What stands in the place of the answer in records."""

WITHOUT_LIMIT = 512
"""`seq_length` for models that read texts of any length."""


@dataclass(kw_only=True)
class ClozeConfig:
    pattern: int | None = field(
        default=None, metadata={"min": 0, "help": "number of the pattern; default: the task's usual one"}
    )
    candidate_scoring: str | None = field(
        default=None,
        metadata={
            "help": "what is compared: the logit of a candidate's only token, or the sum of its log-probabilities, "
            "their mean, or their sum by its letters; default: the task's usual one",
            "choices": SCORINGS,
        },
    )
    score_end: bool | None = field(
        default=None, metadata={"help": "count the token that ends an answer, too; default: as the task does"}
    )
    seq_length: int | None = field(
        default=None,
        metadata={"min": 1, "help": "most tokens that the model reads; default: its positions, 512 without a limit"},
    )


@dataclass(kw_only=True)
class AnyClozeConfig(ClozeConfig):
    cloze: str = field(metadata={"help": "a task, or the YAML file of one of your own", "path": True})


class Asked(NamedTuple):
    """A question in words and in tokens."""

    number: int
    words: ClozeQuestion
    encoded: EncodedQuestion


class ClozeEvaluation(Evaluation[Asked]):
    """The likeliest candidate is chosen.

    Args:
        config: its options.
        cloze: name of the task.
    """

    config: ClozeConfig
    unit = "question"

    def __init__(self, config: ClozeConfig, cloze: str) -> None:
        super().__init__(config)
        self.cloze: Cloze = load_cloze(cloze)
        try:
            self.scoring, self.end = scoring_of(self.cloze, config.candidate_scoring, config.score_end)
        except UserError as error:
            raise _of_line(error) from None

    def questions(self, path: str, generator: TextGenerator[Any], limit: int | None = None) -> list[Asked]:
        framing, tokenizer = generator.framing, generator.tokenizer
        seq_length = self.seq_length(generator)
        try:
            check_cloze(self.cloze, self.config.pattern, self.scoring, framing, tokenizer)
            words = self.cloze.questions(rows_of(path, limit), self.config.pattern)
            encoded = encode_questions(
                words, framing, tokenizer, scoring=self.scoring, end=self.end, seq_length=seq_length
            )
        except UserError as error:
            raise _of_line(error) from None
        return [Asked(number, *pair) for number, pair in enumerate(zip(words, encoded, strict=True))]

    def records(
        self,
        questions: Sequence[Asked],
        generator: TextGenerator[Any],
        progress: Callable[[int], object] | None = None,
    ) -> list[Record]:
        asked = [one.encoded for one in questions]
        found = score_questions(generator.model, generator.framing, asked, progress)
        return [self._record(*pair) for pair in zip(questions, found, strict=True)]

    def metrics(self) -> list[Metric]:
        words = self.cloze.pattern_of(self.config.pattern).words
        labels, texts = [*(words or self.cloze.labels)], self.cloze.has_texts
        known: dict[str, Callable[[], Metric]] = {
            "accuracy": lambda: share("accuracy"),
            "macro_f1": lambda: of_confusion("macro_f1", labels, macro_f1),
            "mcc": lambda: of_confusion("mcc", labels, matthews),
            "f1a": lambda: of_confusion("f1a", labels, binary_f1),
            "em": lambda: share("em", "squad_em") if texts else share_of_groups("em", _group),
            "f1": lambda: share("f1", "squad_f1") if texts else of_confusion("f1", labels, binary_f1),
        }
        return [known[name]() for name in self.cloze.metrics or ("accuracy",)]

    def settings(self, generator: TextGenerator[Any], questions: Sequence[Asked] = ()) -> dict[str, Any]:
        pattern = self.cloze.pattern if self.config.pattern is None else self.config.pattern
        return {
            "cloze": self.cloze.name,
            "pattern": pattern,
            "candidate_scoring": self.scoring,
            "score_end": self.end,
            "seq_length": self.seq_length(generator),
        }

    def seq_length(self, generator: TextGenerator[Any]) -> int:
        """The most tokens that a model may read."""
        limit: int | None = getattr(generator.framing, "max_positions", None)
        return self.config.seq_length or limit or WITHOUT_LIMIT

    def _record(self, asked: Asked, scores: Sequence[CandidateScore]) -> Record:
        words, number = asked.words, chosen(scores)
        record: Record = {
            "idx": words.idx,
            "place": words.place,
            "group": words.group,
            "prompt": prompt_text(words.texts[0]),
            "candidates": [
                {"text": text, "label": label, "logprob": one.logprob, "score": one.score}
                for text, label, one in zip(words.candidates, words.labels, scores, strict=True)
            ],
            "chosen": words.otherwise if number is None else words.labels[number],
            "label": None,
            "truncated": asked.encoded.was_cut,
        }
        if words.right is None:
            return record
        record["label"] = words.labels[words.right[0]] if words.right else words.otherwise
        record["correct"] = number in words.right if number is not None else not words.right
        best = max((scores[one].score for one in words.right), default=scores[0].score)
        record["confidence"] = 0.0 if number is None else scores[number].score - best
        if self.cloze.has_texts:
            record["label"] = list(words.answers)
            for scorer in (SquadExactMatch(), SquadF1()):
                record[scorer.name], _ = scorer.measure(record["chosen"] or "", words.answers)
        return record


@register_evaluation("cloze", config=AnyClozeConfig)
def _any_cloze(config: AnyClozeConfig) -> ClozeEvaluation:
    return ClozeEvaluation(config, config.cloze)


def prompt_text(text: Text) -> str:
    """A question as one text, with a line in the place of the answer."""
    before, behind = ("".join(part.text for part in parts) for parts in text)
    return before + GAP + behind


def _of_line(error: UserError) -> UserError:
    """The error with options as they are written behind an evaluation's name, where they are no flags."""
    return UserError(re.sub(r"`([a-z_]+)`( \w+)?", _as_option, str(error)))


def _as_option(named: re.Match[str]) -> str:
    """`pattern` 0 -> pattern=0"""
    value = (named[2] or "").strip()
    return f"{named[1]}={value}" if value in SCORINGS or value.isdecimal() else named[1] + (named[2] or "")


def _group(record: Mapping[str, Any]) -> str:
    return str(record["group"])


def _register(name: str) -> None:
    @register_evaluation(name, config=ClozeConfig)
    def build(config: ClozeConfig) -> ClozeEvaluation:
        return ClozeEvaluation(config, name)


for _name in cloze_names():
    _register(_name)
