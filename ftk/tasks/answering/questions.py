"""Questions with one answer in words, as a task makes them of its rows, and their token ids."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.data.supervised.squad import NO_ANSWER
from ftk.errors import UserError
from ftk.tasks.answering.asking import Asking

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_BLOCK = 4096
"""Questions that are encoded together."""


class Words(NamedTuple):
    """A part of a question.

    Attributes:
        text: where it `is_text` of the data, the names of special tokens in it are letters like others; in a template
            they are these tokens.
        is_text: whether it is from the data, not of a template.
        stays: whether it stays whole in a question that is too long; a template always does.
    """

    text: str
    is_text: bool = True
    stays: bool = False


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    Attributes:
        before, behind: the text on both sides of the place of the answer.
        answer: its text.
        shown: what is asked without a template, for people.
        place: where its row is, for messages.
        shorter: makes the same question with less of what went before it; None: nothing can be left out.
        around: white space that a tokenizer's own template has in front of the answer and behind it. Question and
            answer are then encoded as one text, as `transformers` does; None: each part by itself.
    """

    before: Sequence[Words]
    answer: str = ""
    behind: Sequence[Words] = ()
    shown: str = ""
    place: str = "the question"
    shorter: Callable[[], Question] | None = None
    around: tuple[str, str] | None = None


class Windows(NamedTuple):
    """How the text that would be cut first is read instead, where a question is too long: in windows that overlap.

    Attributes:
        stride: tokens from the start of one window to the start of the next.
        no_answer: what is learned of a window that does not hold the answer, and of questions that have none
            (`NO_ANSWER`); None: the window is not learned.
    """

    stride: int
    no_answer: str | None


class EncodedQuestion(NamedTuple):
    """Token ids of a question, or of one window of it, and its answer.

    Attributes:
        before, behind: int32 [..], the text on both sides of the place of the answer.
        answer: int32 [..], with the end token if it `is_whole`.
        is_whole: whether nothing of it was cut off.
        shown, reference: question and answer, for people.
        was_cut: whether the question lost anything.
        number: of the question among those that were given; its windows follow each other.
    """

    before: NDArray[np.int32]
    behind: NDArray[np.int32]
    answer: NDArray[np.int32]
    is_whole: bool
    shown: str
    reference: str
    was_cut: bool = False
    number: int = 0


class QuestionEncoder:
    """Makes token ids of questions: of each part by itself, so that no token reaches from a template into a text.

    Args:
        tokenizer: of the model.
        asking: how the model is asked.
    """

    def __init__(self, tokenizer: Tokenizer, asking: Asking) -> None:
        self.tokenizer, self.asking = tokenizer, asking
        self.end = asking.framing.ends[0]
        self._templates: dict[str, list[int]] = {}
        self._special = {token.id for token in tokenizer.command_tokens}

    def whole(self, question: Question) -> EncodedQuestion:
        """One question and its answer, whatever their lengths.

        Raises:
            UserError: the question has no token.
        """
        spaced = self._spaced(question)
        ids = self._asked(question, spaced, {})
        return self._encoded(question, ids, [*self._behind(question, spaced, ids), self.end], True)

    def within(
        self,
        questions: Iterable[Question],
        seq_length: int,
        target_length: int,
        truncate: str,
        where: str = "rows",
        windows: Windows | None = None,
    ) -> list[EncodedQuestion]:
        """Questions and answers of limited lengths; the log says how many were cut.

        A question that is too long loses what can be left out of it, and then tokens of its texts. With `windows`
        nothing is cut: it becomes several, each with a window of the text that would lose tokens first, unless what
        stands around this text leaves no room for a window. A question without an answer has all its windows.

        Args:
            questions: any number.
            seq_length: most tokens of a question, with those that the model's framing adds.
            target_length: most tokens of an answer, its end counted; a cut one has no end.
            truncate: "left": texts lose tokens at their beginnings, the first text first; "right": at their ends, the
                last one first.
            where: they are from, for the log.
            windows: see above.

        Raises:
            UserError: a question has no token, or what stays of it is too long.
        """
        found: list[EncodedQuestion] = []
        number = num_cut = num_in_windows = num_missed = 0
        for block in _blocks(questions):
            if windows is not None and windows.no_answer is not None:  # one text for all that has no answer
                block = [
                    dataclasses.replace(one, answer=windows.no_answer) if one.answer == NO_ANSWER else one
                    for one in block
                ]
            spaced = [self._spaced(question) for question in block]
            texts = {part.text: None for one in spaced for side in one.sides for part in side if part.is_text}
            unique = [*(texts | {one.answer: None for one in spaced})]
            known: dict[str, Any] = dict(zip(unique, self.tokenizer.encode_rows(unique), strict=True))
            for question, own in zip(block, spaced, strict=True):
                fitted, is_cut = self._fitted(question, own, known, seq_length, truncate, windows)
                num_cut += is_cut
                learned: list[Question | None] = [question]
                if windows is not None and len(fitted) > 1:
                    num_in_windows += 1
                    learned, is_missed = self._of_windows(question, known[own.answer], fitted, windows.no_answer)
                    num_missed += is_missed
                for one, (sides, _) in zip(learned, fitted, strict=True):
                    if one is None:
                        continue
                    spelled = own if one is question else self._spaced(one)
                    answer = [*self._behind(one, spelled, sides, known), self.end]
                    is_whole = len(answer) <= target_length
                    made = self._encoded(one, sides, answer[:target_length], is_whole, is_cut)
                    found.append(made._replace(number=number))
                number += 1
        for count, total, what in (
            (num_cut, number, f"questions are longer than `seq_length` {seq_length}: cut (`truncate` {truncate})"),
            (num_in_windows, number, f"questions are longer than `seq_length` {seq_length}: read in windows"),
            (num_missed, num_in_windows, "of these have an answer that stands in none of their windows"),
            (
                sum(not one.is_whole for one in found),
                len(found),
                f"answers are longer than `target_length` {target_length}: cut, and not closed by the end token",
            ),
        ):
            if count:
                logger.info("%s: %d of %d %s", where, count, total, what)
        return found

    def _of_windows(
        self, question: Question, answer: Any, fitted: Sequence[_Fitted], no_answer: str | None
    ) -> tuple[list[Question | None], bool]:
        """What is learned of each window, None for nothing; and whether none of them holds the answer.

        As in the original: a window holds an answer whose text, as the tokenizer spells it, is part of the window's.
        """
        if not question.answer:
            return [question] * len(fitted), False
        text = self.tokenizer.decode([*map(int, answer)]).strip()
        without = None if no_answer is None else dataclasses.replace(question, answer=no_answer)
        found = [question if text and text in self.tokenizer.decode(one.window) else without for one in fitted]
        return found, question not in found and question.answer != no_answer

    def _spaced(self, question: Question) -> _Spaced:
        before, space = _with_spaces(question.before)
        answer = question.answer
        front, back = question.around or ("", "")
        if not self.asking.is_apart:
            answer = ("" if answer[:1].isspace() else space + front) + answer + back
        return _Spaced((before, _with_spaces(question.behind)[0]), answer)

    def _fitted(
        self,
        question: Question,
        spaced: _Spaced,
        known: Mapping[str, Any],
        seq_length: int,
        truncate: str,
        windows: Windows | None,
    ) -> tuple[list[_Fitted], bool]:
        """A question that is not too long, or one for each window; and whether it lost anything."""
        ids, was_cut = self._asked(question, spaced, known), False
        while (excess := self._length(ids) - seq_length) > 0 and question.shorter is not None:
            question, was_cut = question.shorter(), True
            spaced = self._spaced(question)
            ids = self._asked(question, spaced, known)
        if excess <= 0:
            return [_Fitted(ids)], was_cut
        if question.around is not None:
            ids = self._ids(spaced, known)
            excess = self._length(ids) - seq_length
        places = [(side, place) for side in (0, 1) for place, part in enumerate(spaced.sides[side]) if not part.stays]
        if truncate == "right":
            places.reverse()
        if windows is not None and places:
            side, place = places[0]
            whole = ids[side][place]
            if (room := len(whole) - excess) > 0:
                step = min(windows.stride, room)  # no token is left out beside a long question
                starts = range(0, excess + step, step)  # the last window is the first that reaches the end
                return [_Fitted(_with(ids, side, place, own := whole[at : at + room]), own) for at in starts], was_cut
        for side, place in places:
            row = ids[side][place]
            count = min(excess, len(row))
            ids[side][place] = row[count:] if truncate == "left" else row[: len(row) - count]
            excess -= count
        if excess > 0:
            raise UserError(
                f"{question.place}: what stays of a question that is cut takes {seq_length + excess} tokens; raise "
                f"`seq_length`, which is {seq_length}"
            )
        return [_Fitted(ids)], True

    def _length(self, ids: _Ids) -> int:
        return self.asking.added(any(ids[1]))[0] + sum(len(part) for side in ids for part in side)

    def _asked(self, question: Question, spaced: _Spaced, known: Mapping[str, Any]) -> _Ids:
        """The tokens of a question: as one text where it is encoded so, else of each part.

        Texts that spell a special token are encoded apart from a template, in which it is one.
        """
        if question.around is None:
            return self._ids(spaced, known)
        before = spaced.sides[0]
        ids = self.tokenizer.encode("".join(part.text for part in before), command_tokens=True)
        of_template = (token for part in before if not part.is_text for token in self._of_template(part.text))
        if [*filter(self._special.__contains__, ids)] != [*filter(self._special.__contains__, of_template)]:
            return self._ids(spaced, known)
        return self._without_begins([ids]), []

    def _behind(
        self, question: Question, spaced: _Spaced, ids: _Ids, known: Mapping[str, Any] = MappingProxyType({})
    ) -> list[int]:
        """The tokens of an answer, without the end: as they are behind the question where both are one text."""
        if question.around is not None and not self.asking.is_apart:
            parts = spaced.sides[0]
            if len(ids[0]) > 1:  # each by itself
                parts = [part for part in parts[-1:] if not part.is_text]
            context = "".join(part.text for part in parts)
            first, whole = (
                self.tokenizer.encode(text, command_tokens=True) for text in (context, context + spaced.answer)
            )
            if whole[: len(first)] == first and self._special.isdisjoint(whole[len(first) :]):
                return whole[len(first) :]
        row = known.get(spaced.answer)
        return [*map(int, self.tokenizer.encode(spaced.answer) if row is None else row)]

    def _ids(self, spaced: _Spaced, known: Mapping[str, Any]) -> _Ids:
        """The tokens of each part; those of texts are looked up in `known` first."""

        def of_part(part: Words) -> list[int]:
            if part.is_text:
                row = known.get(part.text)
                return self.tokenizer.encode(part.text) if row is None else [*map(int, row)]
            return self._of_template(part.text)

        before, behind = ([of_part(part) for part in side] for side in spaced.sides)
        return self._without_begins(before), behind

    def _of_template(self, text: str) -> list[int]:
        if text not in self._templates:
            self._templates[text] = self.tokenizer.encode(text, command_tokens=True)
        return self._templates[text]

    def _without_begins(self, parts: list[list[int]]) -> list[list[int]]:
        begins = [*getattr(self.asking.framing, "begins", self.tokenizer.prompt_prefix)]
        if begins and parts and parts[0][: len(begins)] == begins:  # which the framing adds, too
            parts[0] = parts[0][len(begins) :]
        return parts

    def _encoded(
        self, question: Question, ids: _Ids, answer: Sequence[int], is_whole: bool, was_cut: bool = False
    ) -> EncodedQuestion:
        if not any(map(any, ids)):
            raise UserError(f"{question.place}: what is asked has no token; write a text, or remove the row")
        before, behind = (np.array([*itertools.chain(*side)], dtype=np.int32) for side in ids)
        return EncodedQuestion(
            before, behind, np.array(answer, dtype=np.int32), is_whole, question.shown, question.answer, was_cut
        )


_Ids = tuple[list[list[int]], list[list[int]]]
"""The token ids of each part before and behind the place of the answer."""


class _Fitted(NamedTuple):
    """A question that is not too long; the tokens of its text that are its window, empty if it is no window."""

    ids: _Ids
    window: Sequence[int] = ()


def _with(ids: _Ids, side: int, place: int, part: list[int]) -> _Ids:
    """The same parts but one."""
    before, behind = ([*one] for one in ids)
    (before, behind)[side][place] = part
    return before, behind


class _Spaced(NamedTuple):
    """A question whose parts have white space where tokenizers want it: in front of a text."""

    sides: tuple[list[Words], list[Words]]
    answer: str


def _with_spaces(words: Sequence[Words]) -> tuple[list[Words], str]:
    """The parts, of which a text gets the white space at the end of the template in front of it; and what is left.

    Neighbouring parts of a template become one.
    """
    parts: list[Words] = []
    for is_text, group in itertools.groupby(words, key=lambda part: part.is_text):
        own = [*group]
        parts += own if is_text else [Words("".join(part.text for part in own), False, True)]
    found: list[Words] = []
    waiting = ""
    for number, part in enumerate(parts, start=1):
        text = part.text
        if part.is_text:
            text, waiting = waiting + text, ""
        else:
            kept = text.rstrip()
            if kept and number == len(parts):
                kept = text.rstrip(" ")  # a line end behind words is a token of the question
            text, waiting = kept, text[len(kept) :]
        if text:
            found.append(part._replace(text=text))
    return found, waiting


def _blocks(questions: Iterable[Question]) -> Iterator[list[Question]]:
    rest = iter(questions)
    while block := [*itertools.islice(rest, _BLOCK)]:
        yield block
