"""The lines of an input in blocks: what cannot be used is said in its place, and the others are answered together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ftk.errors import UserError, with_flags
from ftk_cli.progress import say, write
from ftk_cli.prompt_input import Lines, line_text

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt
    from ftk_cli.results import ResultsFile

_LONGEST_MESSAGE = 1000  # characters

T = TypeVar("T")
Record = Iterable[str]


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A line that can be answered.

    Attributes:
        index: of the line, from 0 on.
        prompt: as the model reads it.
        more: what else its answer needs.
    """

    index: int
    prompt: EncodedPrompt
    more: T


def refusal(error: UserError) -> str:
    """What is wrong with a line; of the line itself no more than a few hundred characters are repeated."""
    message = with_flags(str(error))
    if len(message) <= _LONGEST_MESSAGE:
        return message
    return f"{message[: _LONGEST_MESSAGE // 2]} … {message[-_LONGEST_MESSAGE // 2 :]}"


class WithoutBlank:
    """Counts the prompts without a blank, which are continued at their end: a blank may have been forgotten."""

    def __init__(self) -> None:
        self._number = 0
        self._first: int | None = None

    def count(self, index: int, prompt: EncodedPrompt) -> None:
        if prompt.continued:
            self._number += 1
            self._first = index if self._first is None else self._first

    def note(self) -> str | None:
        """A line about them, if there were any."""
        if self._first is None:
            return None
        if self._number == 1:
            return f"1 prompt has no blank and is continued at the end: line {self._first + 1}"
        return f"{self._number} prompts have no blank and are continued at the end; the first is line {self._first + 1}"


class LineBlocks:
    """Goes through an input with a model.

    Args:
        prog: the command's name, in messages.
        lines: of the input.
        size: lines that are answered together.
        stop: whether the first line that cannot be answered ends the work, behind the answers to those before it.
        as_json: whether records are JSON, else text.
        results: where records go; to stdout if None.
    """

    def __init__(
        self, prog: str, lines: Lines, size: int, *, stop: bool, as_json: bool, results: ResultsFile | None
    ) -> None:
        self.prog, self.lines, self.size = prog, lines, size
        self.stop, self.as_json, self.results = stop, as_json, results
        self.failed = lines.failed  # those of earlier runs, too
        self.without_blank = WithoutBlank()

    def answer(
        self,
        read: Callable[[str], tuple[EncodedPrompt, T]],
        answers: Callable[[list[Asked[T]]], Iterable[Record]],
        bar: Any,
        rate: Callable[[], str],
    ) -> None:
        """Writes a record for each line, in their order.

        Args:
            read: what a line asks for; UserError if it cannot be answered.
            answers: the records of some lines.
            bar, rate: what the user sees meanwhile.
        """
        for block in self.lines.blocks(self.size):
            asked: list[Asked[T]] = []
            records: dict[int, Record] = {}
            stopped_by: UserError | None = None
            for index, line in block:
                try:
                    asked.append(Asked(index, *read(line_text(line))))
                except UserError as error:
                    if self.stop:
                        stopped_by = UserError(f"{self.lines.name}:{index + 1}: {refusal(error)}")
                        break
                    records[index] = self._refused(index, error)
            bar.update(len(records))
            for one in asked:
                self.without_blank.count(one.index, one.prompt)
            for one, record in zip(asked, answers(asked), strict=True):
                records[one.index] = record
            if records:
                write(itertools.chain.from_iterable(records[index] for index in sorted(records)), self.results)
            if stopped_by is not None:
                raise stopped_by
            bar.set_postfix_str(rate())
        write((), self.results)  # of an input without lines there are results, too

    def _refused(self, index: int, error: UserError) -> Record:
        from ftk_cli.answer_lines import error_line, is_terminal

        message = refusal(error)
        say(self.prog, f"{self.lines.name}:{index + 1}: {message}")
        self.failed += 1
        return [error_line(index, message, self.as_json, is_terminal(self.results))]

    def say_without_blank(self) -> None:
        """Says how many prompts had no blank, if there were any."""
        note = self.without_blank.note()
        if note is not None:
            say(self.prog, f"{self.lines.name}: {note}")

    def say_failed(self, what: str) -> None:
        """Says how many lines were not answered, if there were any."""
        if self.failed:
            say(self.prog, f"{self.lines.name}: {self.failed} line{'s' if self.failed > 1 else ''} not {what}")
