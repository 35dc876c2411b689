"""Rows with named fields, each with its place in a file, so that an error can say where it is."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ftk.data.text.files import MAX_DOCUMENT_BYTES, Problem, read_blocks
from ftk.data.text.paths import JSON_SUFFIXES, compressed_names
from ftk.data.text.records import SKIP, parse_block
from ftk.errors import UserError, counted, did_you_mean, shown
from ftk.files import read_json
from ftk.parsing import json_fault

SOURCE, TARGET = ".source", ".target"
"""Two files of lines, whose rows have the fields `source` and `target`."""

_MAX_JSON_BYTES = 1 << 30

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
    """

    values: Mapping[str, Any]
    source: str
    line: int
    name: str = ""

    @property
    def place(self) -> str:
        """Where it stands, for messages: file:line."""
        return f"{self.source}:{self.name or self.line}"

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
                self.refuse(field, f"is missing; {did_you_mean(name, known)}" if known else "is missing")
            value = value[name]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not any(type(value) is one for one in kinds):
            self.refuse(field, f"is {shown(value)}; it must be {' or '.join(_TYPES[one] for one in kinds)}")
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


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a file, in their order; empty lines are none.

    Args:
        path: of JSON lines, perhaps compressed; of one of two files FILE.source and FILE.target; or FILE.json of
            questions as SQuAD writes them.

    Raises:
        UserError: a line cannot be read or holds no JSON object; the two files have different numbers of lines.
    """
    plain = next((path.removesuffix(suffix) for suffix in (SOURCE, TARGET) if path.endswith(suffix)), None)
    if plain is not None:
        yield from _pairs(plain)
        return
    if path.endswith(".json"):
        from ftk.data.supervised.squad import is_squad, squad_rows  # which makes rows of this module

        if is_squad(tree := _value(path)):
            yield from squad_rows(tree, path)
            return
    for line, text in _lines(path):
        if not text or text.isspace():
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            problem = json_fault(error) if isinstance(error, ValueError) else "nested too deeply"
            raise UserError(f"{path}:{line}: not a JSON object on one line ({problem})") from None
        if not isinstance(values, dict):
            raise UserError(f"{path}:{line}: holds {shown(values)}; a row is a JSON object, {{...}}")
        yield Row(values, path, line)


def rows_of(path: str, limit: int | None = None) -> list[Row]:
    """The first rows of a file.

    Args:
        path: as of `read_rows`.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    rows = [*itertools.islice(read_rows(path), limit)]
    if not rows:
        raise UserError(f"{path} holds no row")
    return rows


def _value(path: str) -> Any:
    """The value of a file that is one JSON value; None: it is none, such as one with a value on each line."""
    try:
        return read_json(path, _MAX_JSON_BYTES)
    except (OSError, ValueError):
        return None


def _pairs(plain: str) -> Iterator[Row]:
    source, target = plain + SOURCE, plain + TARGET
    sources, targets = [*_lines(source)], [*_lines(target)]
    if len(sources) != len(targets):
        raise UserError(
            f"{source} has {counted(len(sources), 'line')}, {target} {counted(len(targets), 'line')}; line N of one "
            f"belongs to line N of the other"
        )
    for (line, text), (_, answer) in zip(sources, targets, strict=True):
        yield Row({"source": text, "target": answer}, source, line)


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """The lines of a file with their numbers; the first that cannot be read is an error."""
    for block in read_blocks(path, "line", max_document_bytes=MAX_DOCUMENT_BYTES):
        for record in parse_block(block):
            if isinstance(record, Problem):
                raise UserError(str(record).removesuffix(f", {SKIP}"))  # none of these rows may be left out
            yield record.line, record.text


def split_of(name: str) -> str | None:
    """The split that a file holds, by its name (train.jsonl, val.jsonl.gz, test.source); None: it holds no rows."""
    whole = next((name.removesuffix(end) for end in compressed_names("")[1:] if name.endswith(end)), name)
    for plain, suffixes in ((whole, JSON_SUFFIXES), (name, (SOURCE,))):
        found = next((plain.removesuffix(end) for end in suffixes if plain.endswith(end)), "")
        if found:
            return found
    return None
