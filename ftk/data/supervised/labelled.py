"""Rows of texts with a label, a number, a right choice, or a label for each word."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ftk.config.options import option
from ftk.data.supervised.row import Row, read_each
from ftk.errors import UserError, shown

SINGLE_LABEL, REGRESSION, MULTIPLE_CHOICE, TOKEN_LABELS = KINDS = (
    "single_label",
    "regression",
    "multiple_choice",
    "token_labels",
)
NAMED = (SINGLE_LABEL, TOKEN_LABELS)
"""Kinds whose labels have names."""
_MAX_NUMBER = 1e18  # of a number to predict, whose square fp32 holds


class LabelledText(NamedTuple):
    """What is asked of a row, and the answer.

    Attributes:
        texts: one or two; of token labels the words.
        choices: of a multiple choice, else empty.
        label: number of the label's name, or of the right choice; a number to predict; numbers of the words' labels.
            None: the row has none.
        place: file:line, for messages.
    """

    texts: tuple[str, ...]
    choices: tuple[str, ...] = ()
    label: int | float | tuple[int, ...] | None = None
    place: str = "the text"


@dataclass(kw_only=True)
class LabelledConfig:
    """What rows hold."""

    kind: str = option(
        SINGLE_LABEL,
        "what is predicted of a row: its label, a number, which of its choices is right, or a label for "
        "each of its words",
        daily=True,
        choices=KINDS,
    )
    text_fields: list[str] = option(
        ["text"],
        "the field of a row that holds its text, or the two that hold its texts; of token_labels the field "
        "that holds the list of its words",
        daily=True,
        several=True,
        metavar="FIELD",
    )
    choice_fields: list[str] = option(
        ["choices"],
        "the field that holds the list of a row's choices, or the fields that hold one choice each",
        needs={"kind": MULTIPLE_CHOICE},
        several=True,
        metavar="FIELD",
    )
    label_field: str = option(
        "label",
        "the field that holds the label, the number, the number of the right choice (from 0 on), or the "
        "list of the words' labels",
        metavar="FIELD",
    )
    labels: list[str] = option(
        [],
        "names of the labels; by default those of the rows of the split train",
        daily=True,
        several=True,
        metavar="NAME",
        needs={"kind": NAMED},
    )

    def validate(self) -> Iterator[str]:
        max_fields = 1 if self.kind == TOKEN_LABELS else 2
        if not 1 <= len(self.text_fields) <= max_fields:
            yield f"text_fields has {len(self.text_fields)} fields; {self.kind} needs 1" + " or 2" * (max_fields == 2)
        if not self.choice_fields:
            yield "choice_fields is empty; name the field that holds the choices"
        if len(set(self.labels)) < len(self.labels):
            yield f"labels has {Counter(self.labels).most_common(1)[0][0]!r} twice; name each label once"

    def read(self, rows: Iterable[Row]) -> list[LabelledText]:
        """The texts of rows; a row may lack its label.

        Raises:
            UserError: a field is missing, empty, or of another kind; a label has no such name.
        """
        number = {name: place for place, name in enumerate(self.labels)}
        return [*read_each(rows, lambda row: self._text(row, number))]

    def of_prompt(self, prompt: str) -> LabelledText:
        """What someone asks: texts, then choices, with tabs between; of token labels words with spaces.

        Raises:
            UserError: there are fewer or more.
        """
        of_words = self.kind == TOKEN_LABELS
        parts = prompt.split() if of_words else [part.strip() for part in prompt.split("\t")]
        if not parts or not all(parts):
            raise UserError("a text is empty; write one")
        if of_words:
            return LabelledText(tuple(parts))
        count, is_choice = len(self.text_fields), self.kind == MULTIPLE_CHOICE
        if len(parts) < count + 2 if is_choice else len(parts) != count:
            wanted = ", ".join(self.text_fields) + (" and at least two choices" if is_choice else "")
            raise UserError(f"the model is asked with {wanted}, with tabs between; this line has {len(parts)} texts")
        return LabelledText(tuple(parts[:count]), tuple(parts[count:]))

    def names_in(self, rows: Sequence[Row]) -> list[str]:
        """The names of the labels in rows, in their order; numbers by size.

        Raises:
            UserError: a row has none; all rows have the same; -1 may be a label, or say that there is none.
        """
        names = {name for row in rows for name in self._names(row)}
        if len(names) < 2:
            files = ", ".join(dict.fromkeys(row.source for row in rows))
            raise UserError(
                f"{files}: every row has the label {min(names)!r}; rows to learn from need two, or name both "
                f"by `labels`"
            )
        is_number = all(name.removeprefix("-").isdecimal() for name in names)
        if is_number and {"-1", "0"} <= names:
            row = next(row for row in rows if "-1" in self._names(row))
            row.refuse(
                self.label_field,
                "is -1, which means 'no label' in files of `datasets`; remove such rows, or name all labels by "
                "`labels`, with -1 if it is one",
            )
        return sorted(names, key=int if is_number else None)  # type: ignore[arg-type]

    def _text(self, row: Row, number: dict[str, int]) -> LabelledText:
        label: Any = None
        known = (-1,) if self.kind == REGRESSION or "-1" in self.labels else ()
        has_label = row.has_label(self.label_field, known)
        if self.kind == TOKEN_LABELS:
            texts: tuple[str, ...] = tuple(self._list(row, self.text_fields[0]))
        else:
            texts = tuple(map(row.text, self.text_fields))
        choices = self._choices(row) if self.kind == MULTIPLE_CHOICE else ()
        if has_label and self.kind in NAMED:
            found = tuple(self._number(row, name, number) for name in self._names(row))
            label = found if self.kind == TOKEN_LABELS else found[0]
            if self.kind == TOKEN_LABELS and len(found) != len(texts):
                row.refuse(self.label_field, f"has {len(found)} labels for {len(texts)} words; give one for each")
        elif has_label and self.kind == REGRESSION:
            label = row.get(self.label_field, (float, int))
            if not abs(label) <= _MAX_NUMBER:
                row.refuse(self.label_field, f"is {shown(label)}; it must be a finite number, {_MAX_NUMBER:g} at most")
            label = float(label)
        elif has_label:
            label = row.get(self.label_field, int, range(len(choices)))
        return LabelledText(texts, choices, label, row.place)

    def _names(self, row: Row) -> list[str]:
        """The name of a row's label, or those of its words' labels."""
        if self.kind == TOKEN_LABELS:
            return self._list(row, self.label_field)
        value = row.get(self.label_field, (str, int, bool))
        if value == "":
            row.refuse(self.label_field, "is empty; write a label, or remove the row")
        return [str(value).lower() if isinstance(value, bool) else str(value)]

    def _number(self, row: Row, name: str, number: dict[str, int]) -> int:
        if name not in number:
            row.refuse(self.label_field, f"is {name!r}; it must be one of {', '.join(map(repr, number))} (`labels`)")
        return number[name]

    def _choices(self, row: Row) -> tuple[str, ...]:
        if len(self.choice_fields) > 1:
            return tuple(map(row.text, self.choice_fields))
        choices = self._list(row, self.choice_fields[0])
        if len(choices) < 2:
            row.refuse(self.choice_fields[0], "has one choice; there must be two or more")
        return tuple(choices)

    def _list(self, row: Row, name: str) -> list[str]:
        """The texts of a list, of which there is at least one, and none is empty."""
        values: list[Any] = row.get(name, list)
        if not values:
            row.refuse(name, "is empty; write a text, or remove the row")
        for place, value in enumerate(values):
            if not isinstance(value, str) or not value.strip():
                row.refuse(name, f"has {value!r:.40} at place {place}; each must be a text")
        return values
