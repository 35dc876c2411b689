"""Questions with one answer in words, as a task makes them of its rows, and their token ids."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.data.supervised.squad import NO_ANSWER
from ftk.errors import UserError, shown
from ftk.tasks.answering.asking import Asking

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_BLOCK = 4096
"""Questions that are encoded together."""
_SPELLED = {True: 0.75, False: 1.5}  # tokens for a character that spell words by letters or bytes: ASCII, others


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
        shorter: make the same question without the oldest turn, the two oldest, ...; empty: none can be left out.
        is_one_text: whether question and answer are encoded as one text, as `transformers` does it with a tokenizer's
            own template, and nothing is behind the answer; if not, each part by itself.
        around: white space that the template has in front of the answer and behind it.
    """

    before: Sequence[Words]
    answer: str = ""
    behind: Sequence[Words] = ()
    shown: str = ""
    place: str = "the question"
    shorter: Sequence[Callable[[], Question]] = ()
    is_one_text: bool = False
    around: tuple[str, str] = ("", "")


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

    A question that `is_one_text` is not divided so, unless it is cut, or a text in it spells a special token.
    """

    def __init__(self, tokenizer: Tokenizer, asking: Asking) -> None:
        self.tokenizer, self.asking = tokenizer, asking
        self.end = asking.framing.ends[0]
        self._special = {token.id for token in tokenizer.command_tokens}
        names = sorted({token.text for token in tokenizer.command_tokens}, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._divides = functools.cache(self._divides_texts)
        self._of_template = functools.cache(functools.partial(tokenizer.encode, command_tokens=True))

    def whole(self, question: Question) -> EncodedQuestion:
        """One question and its answer, whatever their lengths.

        Raises:
            UserError: the question has no token.
        """
        known = _Known({}, {})
        asked = self._asked(question, self._spaced(question), known)
        return self._encoded(question, asked.ids, [*self._answer_ids(asked, known), self.end])

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
                    dataclasses.replace(own, answer=windows.no_answer) if own.answer == NO_ANSWER else own
                    for own in block
                ]
            spaced = [self._spaced(question) for question in block]
            known = self._known(block, spaced)
            for question, own in zip(block, spaced, strict=True):
                asked, fitted, was_cut = self._fitted(question, own, known, seq_length, truncate, windows)
                learned, is_missed = self._learned(asked, fitted, known, windows)
                num_cut += was_cut
                num_in_windows += len(fitted) > 1
                num_missed += is_missed
                for answered, (ids, _) in zip(learned, fitted, strict=True):
                    if answered is not None:
                        answer = [*self._answer_ids(answered, known), self.end]
                        found.append(self._encoded(answered.question, ids, answer, target_length, was_cut, number))
                number += 1
        long = f"questions are longer than `seq_length` {seq_length}"
        long_answers = f"answers are longer than `target_length` {target_length}"
        num_cut_answers = sum(not encoded.is_whole for encoded in found)
        log_counts(
            where,
            (num_cut, number, f"{long}: cut (`truncate` {truncate})"),
            (num_in_windows, number, f"{long}: read in windows"),
            (num_missed, num_in_windows, "of these have an answer that stands in none of their windows"),
            (num_cut_answers, len(found), f"{long_answers}: cut, and not closed by the end token"),
        )
        return found

    def _known(self, block: Sequence[Question], spaced: Sequence[_Spaced]) -> _Known:
        """The ids of what stands in the questions, which libraries find faster together."""
        texts: dict[str, None] = {}
        pieces: dict[str, None] = {}
        for question, own in zip(block, spaced, strict=True):
            if question.is_one_text:
                found = self._pieces(own.before)
                pieces |= dict.fromkeys([*found, found[-1] + own.answer])
            else:
                texts |= dict.fromkeys(part.text for side in own.sides for part in side if part.is_text)
                texts[own.answer] = None
        rows, of_pieces = self.tokenizer.encode_rows([*texts]), self.tokenizer.encode_prompts([*pieces])
        of_texts = [row if isinstance(row, list) else np.asarray(row) for row in rows]
        return _Known(dict(zip(texts, of_texts, strict=True)), dict(zip(pieces, of_pieces, strict=True)))

    def _learned(
        self, asked: _Asked, fitted: Sequence[_Fitted], known: _Known, windows: Windows | None
    ) -> tuple[list[_Asked | None], bool]:
        """What is learned of each window, None for nothing; and whether none of them holds the answer.

        As in the original: a window holds an answer whose text, as the tokenizer spells it, is part of the window's.
        """
        question = asked.question
        if windows is None or len(fitted) == 1 or not question.answer:
            return [asked] * len(fitted), False
        text = self.tokenizer.decode(self._of_text(asked.spaced.answer, known)).strip()
        without = None
        if windows.no_answer is not None:
            changed = dataclasses.replace(question, answer=windows.no_answer)
            without = asked._replace(question=changed, spaced=self._spaced(changed))
        found = [asked if text and text in self.tokenizer.decode(window) else without for _, window in fitted]
        return found, asked not in found and question.answer != windows.no_answer

    def _spaced(self, question: Question) -> _Spaced:
        before, space = _with_spaces(question.before)
        answer = question.answer
        if not self.asking.is_apart:
            front, back = question.around
            answer = ("" if answer[:1].isspace() else space + front) + answer + back
        return _Spaced((before, _with_spaces(question.behind)[0]), answer)

    def _fitted(
        self,
        question: Question,
        spaced: _Spaced,
        known: _Known,
        seq_length: int,
        truncate: str,
        windows: Windows | None,
    ) -> tuple[_Asked, list[_Fitted], bool]:
        """A question with what it may keep, its ids, those of each window if it has several, and whether it is cut."""
        asked, was_cut = self._asked(question, spaced, known), False
        if self._length(asked.ids) > seq_length and question.shorter:

            def without(number: int) -> _Asked:
                # The answer may be another than that of the row: of a window without one.
                shorter = dataclasses.replace(question.shorter[number](), answer=question.answer)
                return self._asked(shorter, self._spaced(shorter), known)

            longer = range(len(question.shorter) - 1)  # the shortest is taken if none of the others is short enough
            number = bisect.bisect_left(longer, True, key=lambda count: self._length(without(count).ids) <= seq_length)
            asked, was_cut = without(number), True
        if self._length(asked.ids) > seq_length and asked.question.is_one_text:
            asked = self._by_parts(asked.question, asked.spaced, known)
        ids, spaced = asked.ids, asked.spaced
        if (excess := self._length(ids) - seq_length) <= 0:  # parts by themselves may have fewer tokens than one text
            return asked, [_Fitted(ids)], was_cut
        places = [(side, place) for side in (0, 1) for place, part in enumerate(spaced.sides[side]) if not part.stays]
        if truncate == "right":
            places.reverse()
        if windows is not None and places:
            side, place = places[0]
            whole = ids[side][place]
            if (room := len(whole) - excess) > 0:
                step = min(windows.stride, room)  # no token is left out beside a long question
                starts = range(0, excess + step, step)  # the last window is the first that reaches the end
                rows = [_Fitted(_with(ids, side, place, own := whole[at : at + room]), own) for at in starts]
                return asked, rows, was_cut
        for side, place in places:
            row = ids[side][place]
            count = min(excess, len(row))
            ids[side][place] = row[count:] if truncate == "left" else row[: len(row) - count]
            excess -= count
        if excess > 0:
            told = any(part.is_text and part.stays for part in itertools.chain(*spaced.sides))
            what, shorter = (" (its system message)", "shorten that, or ") if told else ("", "")
            raise UserError(
                f"{question.place}: what stays of a question that is cut{what} takes {seq_length + excess} tokens; "
                f"{shorter}raise `seq_length`, which is {seq_length}{_spelled(spaced, ids)}"
            )
        return asked, [_Fitted(ids)], True

    def _length(self, ids: _Ids) -> int:
        return self.asking.added(any(ids[1]))[0] + sum(len(part) for side in ids for part in side)

    def _asked(self, question: Question, spaced: _Spaced, known: _Known) -> _Asked:
        """The tokens of a question: as one text where it is encoded so, else of each part.

        Texts that spell a special token are encoded apart from a template, in which it is one.
        """
        if not question.is_one_text:
            return self._by_parts(question, spaced, known)
        assert not question.behind, "one text ends with the answer"
        pieces = self._pieces(spaced.before)
        ids = [token for piece in pieces for token in self._of_piece(piece, known)]
        template = (part.text for part in spaced.sides[0] if not part.is_text)
        of_template = (token for text in template for token in self._of_template(text))
        if [*filter(self._special.__contains__, ids)] != [*filter(self._special.__contains__, of_template)]:
            return self._by_parts(question, spaced, known)
        return _Asked(question, spaced, (self._without_begins([ids]), []), pieces[-1])

    def _by_parts(self, question: Question, spaced: _Spaced, known: _Known) -> _Asked:
        def of_part(part: Words) -> list[int]:
            return self._of_text(part.text, known) if part.is_text else self._of_template(part.text)

        before, behind = ([of_part(part) for part in side] for side in spaced.sides)
        last = "".join(part.text for part in spaced.sides[0][-1:] if not part.is_text)
        return _Asked(question, spaced, (self._without_begins(before), behind), self._pieces(last)[-1])

    def _answer_ids(self, asked: _Asked, known: _Known) -> list[int]:
        """The tokens of an answer, without the end: as they are behind the question where both are one text."""
        question, answer = asked.question, asked.spaced.answer
        if question.is_one_text and question.answer and not self.asking.is_apart:
            first, whole = (self._of_piece(text, known) for text in (asked.last, asked.last + answer))
            if whole[: len(first)] == first and self._special.isdisjoint(whole[len(first) :]):
                return whole[len(first) :]
        return self._of_text(answer, known)

    def _pieces(self, text: str) -> list[str]:
        """A text, cut in front of special tokens: the ids of each piece do not depend on the others."""
        starts = (match.start() for match in self._names.finditer(text) if self._divides(match.group()))
        return [text[start:end] for start, end in itertools.pairwise([0, *starts, len(text)])]

    def _divides_texts(self, name: str) -> bool:
        """Whether what stands in front of a special token is encoded apart from it, and from what is behind it.

        Not if the token takes the white space in front of it, for example, is one only between words, or is found in
        the normal form of a text.
        """

        def ids(text: str) -> list[int]:
            return self.tokenizer.encode(text, command_tokens=True)

        cases = (("a", "a"), ("a ", "a"), ("a", " a"))
        return all(ids(before + name + behind) == ids(before) + ids(name + behind) for before, behind in cases)

    def _of_piece(self, text: str, known: _Known) -> list[int]:
        if text not in known.pieces:
            known.pieces[text] = self.tokenizer.encode(text, command_tokens=True)
        return known.pieces[text]

    def _of_text(self, text: str, known: _Known) -> list[int]:
        if text not in known.texts:
            known.texts[text] = self.tokenizer.encode(text)
        return [*map(int, known.texts[text])]

    def _without_begins(self, parts: list[list[int]]) -> list[list[int]]:
        begins = [*getattr(self.asking.framing, "begins", self.tokenizer.prompt_prefix)]
        if begins and parts and parts[0][: len(begins)] == begins:  # which the framing adds, too
            parts[0] = parts[0][len(begins) :]
        return parts

    def _encoded(
        self,
        question: Question,
        ids: _Ids,
        answer: Sequence[int],
        target_length: int | None = None,
        was_cut: bool = False,
        number: int = 0,
    ) -> EncodedQuestion:
        if not any(map(any, ids)):
            raise UserError(f"{question.place}: what is asked has no token; write a text, or remove the row")
        before, behind = (np.array([*itertools.chain(*side)], dtype=np.int32) for side in ids)
        kept = np.array(answer[:target_length], dtype=np.int32)
        is_whole = len(kept) == len(answer)
        return EncodedQuestion(before, behind, kept, is_whole, question.shown, question.answer, was_cut, number)


_Ids = tuple[list[list[int]], list[list[int]]]
"""The token ids of each part before and behind the place of the answer."""


class _Known(NamedTuple):
    """Token ids that were found before: of texts of the data, and of pieces of questions that are one text."""

    texts: dict[str, Any]
    pieces: dict[str, list[int]]


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

    @property
    def before(self) -> str:
        return "".join(part.text for part in self.sides[0])


class _Asked(NamedTuple):
    """A question with its token ids, and the last text in front of the answer that decides about the answer's."""

    question: Question
    spaced: _Spaced
    ids: _Ids
    last: str


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


def _spelled(spaced: _Spaced, ids: _Ids) -> str:
    """For messages: the words of a template, where the tokenizer has few of them, as it is in another language."""
    sides = zip(spaced.sides, ids, strict=True)
    kept = [(part.text, len(row)) for side in sides for part, row in zip(*side, strict=True) if not part.is_text]
    text, taken = "".join(words for words, _ in kept), sum(count for _, count in kept)
    if taken < _SPELLED[text.isascii()] * len(text) or not text:
        return ""
    return f"; the tokenizer has few tokens for words as in {shown(text)}: a template in another language takes fewer"


def _blocks(questions: Iterable[Question]) -> Iterator[list[Question]]:
    rest = iter(questions)
    while block := [*itertools.islice(rest, _BLOCK)]:
        yield block


def log_counts(where: str, *counts: tuple[int, int, str]) -> None:
    """Log what happened to some of the questions or answers: each of `counts` is how many, of how many, and what."""
    for count, total, what in counts:
        if count:
            logger.info("%s: %d of %d %s", where, count, total, what)
