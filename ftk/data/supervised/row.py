"""A row with named fields and its place in a file, so that an error can say where it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ftk.errors import UserError, counted, nearest, shown

R = TypeVar("R")

_MAX_SHOWN_ERRORS = 5

SOURCE, TARGET = ".source", ".target"
"""Two files of lines, whose rows have the fields `source` and `target`."""

_TYPES = {
    str: "a text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One row.

    Attributes:
        values: its fields.
        source, line: the file and the number of the line from 1 on.
        name: where it stands in a file that is one JSON value: data[0].paragraphs[2].
        is_text: whether all values are texts, as in CSV: one counts as a number where a number is asked for, and an
            empty one is no label.
        number: of the row in its file from 0 on, where that is not `line` - 1.
    """

    values: Mapping[str, Any]
    source: str
    line: int
    name: str = ""
    is_text: bool = False
    number: int | None = None

    @property
    def place(self) -> str:
        """Where it stands, for messages: file:line."""
        return f"{self.source}:{self.name or self.line}"

    @property
    def idx(self) -> Any:
        """Its id in predictions: its field `idx` or `id`, else its index in the file, counted from 0."""
        number = self.line - 1 if self.number is None else self.number
        found = self.values.get("idx", self.values.get("id", number))
        return _spelled(found) if self.is_text and isinstance(found, str) else found

    def get(self, field: str, kind: type | tuple[type, ...] = str, choices: Collection[Any] | None = None) -> Any:
        """The value of a field.

        Args:
            field: its name; of a field within an object the names with dots between.
            kind: what it has to be; a whole number is no bool, and a bool no number.
            choices: what it may be; None: anything.

        Raises:
            UserError: it is missing, of another kind, or none of the choices.
        """
        value: Any = self.values
        for name in field.split("."):
            if not isinstance(value, Mapping) or name not in value:
                known = [*value] if isinstance(value, Mapping) else []
                near = nearest(name, known)
                there = f"there are: {', '.join(known)}" if near is None else f"there is {near!r}"
                self.refuse(field, f"is missing; {there}" if known else "is missing")
            value = value[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if self.is_text and str not in kinds and isinstance(value, str):  # what a reader put in is no text
            value = _spelled(value)
        if not any(type(value) is kind for kind in kinds):
            self.refuse(field, f"is {shown(value)}; it must be {' or '.join(_TYPES[kind] for kind in kinds)}")
        if choices is not None and value not in choices:
            self.refuse(field, f"is {shown(value)}; it must be one of {', '.join(map(shown, choices))}")
        return value

    def find(self, field: str) -> Any:
        """The value of a field, named as for `get`; None if it is missing."""
        value: Any = self.values
        for name in field.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value

    def has_label(self, field: str, labels: Collection[Any]) -> bool:
        """Whether there is a label; `datasets` writes -1 for none, where the labels are whole numbers without it."""
        value = self.find(field)
        if self.is_text and isinstance(value, str):
            if not value:
                return False
            value = value if value in labels else _spelled(value)
        return value is not None and (type(value) is not int or value != -1 or value in labels)

    def text(self, field: str) -> str:
        """The text of a field, which holds more than white space.

        Raises:
            UserError: it is missing, no text, or white space alone.
        """
        value: str = self.get(field)
        if not value or value.isspace():
            self.refuse(field, "is empty; write a text, or remove the row")
        return value

    def refuse(self, field: str, problem: str) -> NoReturn:
        """Raises UserError that names place and field."""
        place = self.place
        if field == TARGET[1:] and self.source.endswith(SOURCE):
            place = f"{self.source.removesuffix(SOURCE)}{TARGET}:{self.line}"
        raise UserError(f"{place}: field {field!r} {problem}")


def files_of(path: str) -> list[str]:
    """The files that are read for a path: of FILE.source and FILE.target both."""
    plain = next((path.removesuffix(end) for end in (SOURCE, TARGET) if path.endswith(end)), None)
    return [path] if plain is None else [plain + SOURCE, plain + TARGET]


def _spelled(text: str) -> Any:
    """The number or the truth value that a text spells as JSON does, whole where its fraction is 0; else the text."""
    try:
        value = json.loads(text.strip().lower())
    except (ValueError, RecursionError):
        return text
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)) else text


def read_each(rows: Iterable[Row], read: Callable[[Row], R]) -> Iterator[R]:
    """Reads each row, up to the first mistake.

    Args:
        rows: of files.
        read: raises UserError where a row is not as it must be.

    Raises:
        UserError: some are not: the first mistakes, one per line, and the number of the others. Where no row is as it
            must be, which an option decides, the first alone.
    """
    errors: list[str] = []
    num_wrong = num_right = 0
    for row in rows:
        try:
            found = read(row)
        except UserError as error:
            num_wrong += 1
            if len(errors) < _MAX_SHOWN_ERRORS:
                errors.append(str(error))
        else:
            num_right += 1
            if not errors:
                yield found
    if errors:
        shown_errors = errors if num_right else errors[:1]
        num_more = num_wrong - len(shown_errors)
        more = [f"{counted(num_more, 'more row')} cannot be read either"] * bool(num_more)
        raise UserError("\n".join([*shown_errors, *more]))
