"""The task seq2seq: a target for each source, put to the model by a pattern (Du et al. 2022, 3.3)."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftk.config.options import option
from ftk.data.supervised.row import Row
from ftk.data.supervised.squad import NO_ANSWER
from ftk.errors import UserError
from ftk.registry import register_task
from ftk.tasks.answering.questions import Question, Windows, Words
from ftk.tasks.answering.task import AnswerConfig, AnswerTask, RowQuestions

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class Seq2SeqConfig(AnswerConfig):
    pattern: str = option(
        "{source} {}",
        "how the model is asked: a text with {FIELD} for fields of a row, and {} where the target is; "
        "e.g. '{} Content: {source}', or for causal models 'Text: {source} Summary: {}'",
        metavar="TEXT",
    )
    target_field: str = option("target", "field of a row that holds what the model is to write", metavar="FIELD")
    expected: str = option(
        "sentence",
        "how long a target is; models with several masks are asked by that of its length",
        choices=("word", "sentence", "text"),
    )
    window_stride: int | None = option(
        None,
        "read a text that is too long in windows, each of which starts this many tokens after the one before, as "
        "samples of their own: of a pattern's texts the one that `truncate` would cut first; default: it is cut",
        min=1,
        unit="tokens",
    )
    no_answer: str | None = option(
        NO_ANSWER,
        "what is learned of windows that do not hold the target, and of rows without one, whose target is N/A; none: "
        "these windows are not learned",
        metavar="TEXT",
        needs={"window_stride": True},
    )

    def validate(self) -> Iterator[str]:
        if self.window_stride is not None and self.window_stride >= self.seq_length:
            yield (
                f"window_stride is {self.window_stride}; it must be below `seq_length`, {self.seq_length}, so "
                f"that windows overlap; half of it is usual"
            )
        if self.no_answer is not None and not self.no_answer.strip():
            yield "no_answer is empty; it must be a text, or none"
        try:
            Pattern(self.pattern)
        except ValueError as error:
            yield f"pattern is {self.pattern!r}; {error}"


class Pattern:
    """A text with fields and the place of the answer.

    Args:
        text: with {FIELD} for fields, and {} for the place of the answer; {{ is a brace.

    Attributes:
        fields: their names, in the order of the text.

    Raises:
        ValueError: it is no such text; says how to mend it.
    """

    def __init__(self, text: str) -> None:
        self._sides: tuple[list[Words | str], list[Words | str]] = ([], [])  # a text is the name of a field
        side, num_places = self._sides[0], 0
        for literal, name, form, conversion in string.Formatter().parse(text):
            if literal:
                side.append(Words(literal, is_text=False, stays=True))
            if name is None:
                continue
            if form or conversion:
                raise ValueError(f"a field is its name in braces alone, {{{name}}}")
            if name:
                side.append(name)
            else:
                side, num_places = self._sides[1], num_places + 1
        self.fields = [part for side in self._sides for part in side if isinstance(part, str)]
        if num_places != 1 or not self.fields:
            raise ValueError("it must hold {} once, where the target is, and at least one {FIELD}")

    def question(self, value: Callable[[str], str], answer: str = "", place: str = "the question") -> Question:
        """The question with the values of fields in their places."""
        shown = " ".join(value(name) for name in self.fields)
        before, behind = (
            [Words(value(part)) if isinstance(part, str) else part for part in side] for side in self._sides
        )
        return Question(before, answer, behind, shown, place)


@register_task("seq2seq", config=Seq2SeqConfig, criterion="cross_entropy", dataset="rows")
class Seq2SeqTask(AnswerTask):
    """The target of each source."""

    config: Seq2SeqConfig

    @classmethod
    def expected(cls, config: Seq2SeqConfig) -> str:
        return config.expected

    @classmethod
    def questions(cls, config: Seq2SeqConfig, tokenizer: Tokenizer) -> RowQuestions:
        pattern = Pattern(config.pattern)

        def of_row(row: Row) -> Iterator[Question]:
            yield pattern.question(row.text, row.text(config.target_field), row.place)

        def of_text(text: str) -> Question:
            if len(pattern.fields) > 1:
                raise UserError(
                    f"the model is asked with the fields {', '.join(pattern.fields)}; give rows that have them, in a "
                    f"data folder"
                )
            return pattern.question(lambda field: text)

        windows = None if config.window_stride is None else Windows(config.window_stride, config.no_answer)
        return RowQuestions(of_row, of_text, windows=windows)
