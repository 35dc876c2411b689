"""Cloze tasks: patterns that put the fields of a row around a gap, and what may stand in the gap."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ftk.data.supervised.cloze_readers import READERS, Item, standard_punctuation, without_final_punctuation
from ftk.data.supervised.row import Row
from ftk.errors import UserError, counted, shown

GAP, PROMPT, BORDER = "gap", "prompt", "|"
EACH = "each"


class Part(NamedTuple):
    """A piece of a question's text, which is encoded by itself.

    Attributes:
        text: with its spaces.
        shorten: whether it may lose tokens from its end where a question is too long.
        second: whether it belongs to the second half of the pattern; the longer half is shortened first.
        ids: of prompt tokens, which stand here in place of a text.
    """

    text: str
    shorten: bool = False
    second: bool = False
    ids: tuple[int, ...] = ()


class Text(NamedTuple):
    """What stands before and behind the gap."""

    before: tuple[Part, ...]
    behind: tuple[Part, ...]

    @property
    def ends_in_gap(self) -> bool:
        """Whether nothing but punctuation stands behind the gap."""
        return all(_is_punctuation(part.text) for part in self.behind)

    def filled(self, words: str) -> str:
        """The text with words in its gap."""
        before, behind = ("".join(part.text for part in parts) for parts in self)
        return before + words + behind


@dataclass(frozen=True, slots=True)
class ClozeQuestion:
    """A text with a gap, and the candidates for it.

    Attributes:
        texts: the text that all K candidates share, or one for each.
        candidates: K texts, with the space in front of them.
        labels: what choosing each of them says, K values.
        right: which of them are right; none may be (none of one candidate). None: the row has no label.
        otherwise: the label if the only candidate is not chosen.
        idx: of the row, as the data set has it.
        group: what questions that are counted together have in common.
        answers: all right answers as texts, where they are more than what is among the candidates.
        place: file:line.
    """

    texts: tuple[Text, ...]
    candidates: tuple[str, ...]
    labels: tuple[Any, ...]
    right: tuple[int, ...] | None
    otherwise: Any
    idx: Any
    group: Any
    answers: tuple[str, ...]
    place: str

    def text_of(self, number: int) -> Text:
        """The text around the gap for a candidate."""
        return self.texts[number if len(self.texts) > 1 else 0]


class Piece(NamedTuple):
    """A piece of a pattern: literal text, a field, the gap, a slot for continuous prompts or the border of halves."""

    kind: str
    text: str = ""  # literal, or the name of the field
    space: str = ""  # in front of the field, encoded with it
    modifiers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pattern:
    """One way to ask.

    Attributes:
        pieces: of the text.
        words: label -> what stands for it in the gap; None: there are candidates.
        candidates: texts with fields; a field that holds a list gives one candidate for each of its texts.
        each: fields, one for each candidate, of which the text shows the candidate's own.
    """

    pieces: tuple[Piece, ...]
    words: Mapping[Any, str] | None
    candidates: tuple[tuple[Piece, ...], ...] = ()
    each: tuple[str, ...] = ()

    @property
    def ends_in_gap(self) -> bool:
        """Whether nothing but punctuation, and fields that may be empty, stands behind the gap."""
        kinds = [piece.kind for piece in self.pieces]
        behind = self.pieces[kinds.index(GAP) + 1 :]
        return all(
            "optional" in piece.modifiers if piece.kind == "field" else _is_punctuation(piece.text) for piece in behind
        )

    def distribute(self, ids: Sequence[int], reads_behind: bool) -> list[tuple[int, ...]]:
        """What each slot for prompt tokens gets, from left to right: the same number, until none is left.

        Args:
            ids: of the prompt tokens.
            reads_behind: whether slots behind the gap get some, too.

        Raises:
            UserError: there is no slot.
        """
        kinds = [piece.kind for piece in self.pieces]
        slots = (kinds if reads_behind else kinds[: kinds.index(GAP)]).count(PROMPT)
        if ids and not slots:
            raise UserError(
                f"`num_prompt_tokens` {len(ids)}: the pattern has no {{prompt}} that is read; choose another "
                f"`pattern`, or give `num_prompt_tokens` 0 and `prefix_prompt`"
            )
        share = math.ceil(len(ids) / max(slots, 1))
        return [tuple(ids[share * slot : share * (slot + 1)]) for slot in range(slots)]


@dataclass(frozen=True)
class Cloze:
    """A cloze task.

    Attributes:
        name: for messages and results.
        patterns: by their numbers.
        pattern: the number of the usual one.
        scoring: the usual score of candidates, one of `ftk.generation.questions.SCORINGS`.
        end: whether that includes the end of the answer.
        metrics: names of what an evaluation counts.
        label: the field of the right answer; labels: its values by candidate, where the candidates are fields; without
            any it is the number of the right one, from 0 on.
        reader: makes rows of questions of the rows of a file (`ftk.data.supervised.cloze_readers`).
        texts: texts with fields that a pattern names like a field, and which are encoded as a whole. What they name are
            fields of the row, no other texts.
        rename: the name of a field in patterns -> that in the file.
        standard_punctuation: whether typographic quotes and dashes become plain ones.
    """

    name: str
    patterns: Mapping[int, Pattern]
    pattern: int
    scoring: str
    end: bool = False
    metrics: tuple[str, ...] = ()
    label: str = "label"
    labels: tuple[Any, ...] = ()
    reader: str = "plain"
    texts: Mapping[str, tuple[Piece, ...]] = field(default_factory=dict)
    rename: Mapping[str, str] = field(default_factory=dict)
    standard_punctuation: bool = False

    @property
    def has_texts(self) -> bool:
        """Whether the right answers are texts, which are compared as such (ReCoRD)."""
        return self.reader == "record"

    def pattern_of(self, number: int | None = None) -> Pattern:
        """The pattern with a number; None: the usual one.

        Raises:
            UserError: there is none.
        """
        number = self.pattern if number is None else number
        if number not in self.patterns:
            raise UserError(f"`pattern` {number}: {self.name} has the patterns {', '.join(map(str, self.patterns))}")
        return self.patterns[number]

    def default_pattern(self, number: int | None = None, *, reads_behind: bool = True) -> int:
        """The number itself; None: the task's own, or the first that a model reads which reads nothing behind a gap."""
        if number is not None:
            return number
        fitting = (self.pattern, *self.patterns)
        return next((number for number in fitting if reads_behind or self.patterns[number].ends_in_gap), self.pattern)

    def questions(
        self,
        rows: Iterable[Row],
        pattern: int | None = None,
        train: bool = False,
        *,
        prompts: tuple[Sequence[int], Sequence[int]] = ((), ()),
        reads_behind: bool = True,
    ) -> list[ClozeQuestion]:
        """The questions of rows, by a pattern.

        Args:
            rows: of a file.
            pattern: its number; None: the usual one.
            train: whether to make what is learned: every question has a right candidate, some rows make several
                questions or none.
            prompts: ids of prompt tokens in front of the text, and of those that are dealt to the slots of the pattern.
            reads_behind: whether slots behind the gap get some, too.

        Raises:
            UserError: a field is missing or not as it must be; there is no slot for prompt tokens.
        """
        chosen, (front, rest) = self.pattern_of(pattern), prompts
        slots = [tuple(front), *chosen.distribute(rest, reads_behind)]
        return [self._question(item, chosen, train, slots) for item in READERS[self.reader](rows, train)]

    def _question(self, item: Item, pattern: Pattern, train: bool, slots: Sequence[tuple[int, ...]]) -> ClozeQuestion:
        row = item.row
        if pattern.words is not None:
            candidates, labels = tuple(pattern.words.values()), tuple(pattern.words)
        else:
            candidates = tuple(text for pieces in pattern.candidates for text in self._expanded(pieces, row))
            labels = item.labels or self.labels or tuple(range(len(candidates)))
            if len(candidates) != len(labels):
                problem = f"has {counted(len(candidates), 'candidate')}, but {self.name} has {len(labels)} labels"
                raise UserError(f"{row.place}: {problem}; their numbers must be equal")
            if len(pattern.each) not in (0, len(candidates)):
                problem = f"has {counted(len(candidates), 'candidate')}, but 'each' has {len(pattern.each)} fields"
                raise UserError(f"{row.place}: {problem}; their numbers must be equal")
        right = item.right
        if right is None and not item.own_label:
            right = self._right(row, labels)
        if train and right is None:
            row.refuse(self.label, "is missing; a row to learn from says which answer is right")
        texts = tuple(self._text(pattern, row, each, slots) for each in pattern.each or ("",))
        return ClozeQuestion(
            texts=texts,
            candidates=candidates,
            labels=labels,
            right=right,
            otherwise=item.otherwise,
            idx=row.idx if item.idx is None else item.idx,
            group=item.group,
            answers=item.answers,
            place=row.place,
        )

    def _right(self, row: Row, labels: Sequence[Any]) -> tuple[int, ...] | None:
        """The number of the candidate that the label names; None: there is no label, as in test files."""
        if not row.has_label(self.label, labels):
            return None
        value = row.get(self.label, tuple({type(label) for label in labels}), labels)
        return (labels.index(value),)

    def _text(self, pattern: Pattern, row: Row, each: str, slots: Sequence[tuple[int, ...]]) -> Text:
        """What stands around the gap; `each`: the field that `{each}` stands for; `slots`: ids of prompt tokens."""
        (front, *others), second = slots, False
        waiting = iter(others)
        before: list[Part] = [Part("", ids=front)]
        behind: list[Part] = []
        own = before
        for piece in pattern.pieces:
            if piece.kind == GAP:
                own = behind
            elif piece.kind == BORDER:
                second = True
            elif piece.kind == PROMPT:
                own.append(Part("", second=second, ids=next(waiting, ())))
            else:
                text = piece.text if piece.kind == "text" else self._value(piece, row, each)
                own.append(Part(text, "shorten" in piece.modifiers, second))
        return Text(*(tuple(part for part in parts if part.text or part.ids) for parts in (before, behind)))

    def _value(self, piece: Piece, row: Row, each: str = "") -> str:
        """The text of a field, or of one of `texts`, with the space in front of it."""
        name = each if piece.text == EACH and each else piece.text
        if name not in self.texts:
            return self._field(piece, row, name)
        return self._changed("".join(self._field(part, row, part.text) for part in self.texts[name]), piece)

    def _field(self, piece: Piece, row: Row, name: str) -> str:
        """Literal text as it is, or the text of a field."""
        if piece.kind == "text":
            return piece.text
        name = self.rename.get(name, name)
        if "optional" in piece.modifiers:
            text: str = "" if row.find(name) is None else row.get(name)
        else:
            text = row.text(name)
        return self._changed(text, piece)

    def _changed(self, text: str, piece: Piece) -> str:
        if self.standard_punctuation:
            text = standard_punctuation(text)
        if "lower" in piece.modifiers:
            text = text[:1].lower() + text[1:]
        if "bare" in piece.modifiers:
            text = without_final_punctuation(text)
        return piece.space + text

    def _expanded(self, pieces: Sequence[Piece], row: Row) -> Iterator[str]:
        """The text of a candidate, or of several where it is a field that holds a list."""
        first = pieces[0]
        name = self.rename.get(first.text, first.text)
        if len(pieces) > 1 or first.kind == "text" or not isinstance(row.find(name), list):
            yield "".join(piece.text if piece.kind == "text" else self._value(piece, row) for piece in pieces)
            return
        for text in row.get(name, list):
            if not isinstance(text, str) or not text.strip():
                row.refuse(name, f"holds {shown(text)}; a candidate is a text that is not empty")
            yield self._changed(text, first)


def _is_punctuation(text: str) -> bool:
    """Whether a text holds punctuation and white space alone; an empty one does."""
    return all(letter.isspace() or unicodedata.category(letter).startswith("P") for letter in text)
