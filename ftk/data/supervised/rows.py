"""Files of rows: JSON lines, JSON, CSV, TSV, Parquet and Arrow, and two files of lines."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from ftk.data.supervised.row import SOURCE, TARGET, Row, files_of
from ftk.data.supervised.squad import is_squad, squad_rows
from ftk.data.text.blocks import MAX_DOCUMENT_BYTES, Problem
from ftk.data.text.files import read_blocks
from ftk.data.text.paths import JSON_SUFFIXES, TABLE_SUFFIXES, compressed_names
from ftk.data.text.records import SKIP, parse_block
from ftk.data.text.tables import read_records
from ftk.errors import UserError, counted, shown
from ftk.files import read_json
from ftk.parsing import json_fault

_MAX_JSON_BYTES = 1 << 30
_TEXT_TABLES = (".csv", _TABBED := ".tsv")
_SHARD = re.compile(r"-\d{5}-of-\d{5}$")
"""How the library `datasets` numbers the files of a split."""


def read_rows(path: str) -> Iterator[Row]:
    """The rows of a file, in their order; empty lines are none.

    Args:
        path: of JSON lines, perhaps compressed; of one of two files FILE.source and FILE.target; FILE.json of a list of
            objects or of questions as SQuAD writes them; FILE.csv or FILE.tsv, whose first line names the fields;
            FILE.parquet or FILE.arrow.

    Raises:
        UserError: a line cannot be read or holds no JSON object; the two files have different numbers of lines.
    """
    name = _without_compression(path)
    if path.endswith((SOURCE, TARGET)):
        yield from _pairs(*files_of(path))
    elif path.endswith(TABLE_SUFFIXES):
        yield from (Row(values, path, number) for number, values in enumerate(read_records(path), start=1))
    elif name.endswith(_TEXT_TABLES):
        yield from _text_table(path, is_tabbed=name.endswith(_TABBED))
    elif path.endswith(".json") and is_squad(tree := _value(path)):
        yield from squad_rows(tree, path)
    elif path.endswith(".json") and isinstance(tree, list):
        for number, values in enumerate(tree):
            yield _row(values, path, 1, f"[{number}]", number)
    else:
        yield from _json_lines(path)


def _json_lines(path: str) -> Iterator[Row]:
    for line, text in _lines(path):
        if not text or text.isspace():
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            problem = json_fault(error) if isinstance(error, ValueError) else "nested too deeply"
            raise UserError(f"{path}:{line}: not a JSON object on one line ({problem})") from None
        yield _row(values, path, line)


def _row(values: Any, path: str, line: int, name: str = "", number: int | None = None) -> Row:
    if not isinstance(values, dict):
        raise UserError(f"{path}:{name or line}: holds {shown(values)}; a row is a JSON object, {{...}}")
    return Row(values, path, line, name, number=number)


def _text_table(path: str, is_tabbed: bool) -> Iterator[Row]:
    """The rows of CSV, whose cells may stand in quotes and then hold line ends; or of TSV, where nothing is quoted."""
    options: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if is_tabbed else {"strict": True}
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    reader = csv.reader((f"{text}\n" for _, text in _lines(path)), **options)
    names: list[str] = []
    begins = number = 0
    try:
        for cells in reader:
            line, begins = begins + 1, reader.line_num
            if not names:
                names = cells
                if len({*names}) < len(names):
                    raise UserError(f"{path}:1: has duplicate column names ({', '.join(names)}); rename one")
            elif cells:  # else the line is empty
                if len(cells) != len(names):
                    found = f"{counted(len(cells), 'cell')}, but the header has {counted(len(names), 'column')}"
                    raise UserError(f"{path}:{line}: has {found}")
                yield Row(dict(zip(names, cells, strict=True)), path, line, is_text=True, number=number)
                number += 1
    except csv.Error as error:
        kind = "TSV" if is_tabbed else "CSV"
        raise UserError(f"{path}:{begins + 1}: not {kind} ({str(error).partition(' - ')[0]})") from None


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


def _pairs(source: str, target: str) -> Iterator[Row]:
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
    """The split that a file holds, by its name (train.jsonl, val.csv.gz, test.source, train-00000-of-00001.parquet);
    None: it holds no rows."""
    suffixes = [(_without_compression(name), (*JSON_SUFFIXES, *_TEXT_TABLES)), (name, (SOURCE, *TABLE_SUFFIXES))]
    found = next((one.removesuffix(end) for one, ends in suffixes for end in ends if one.endswith(end)), None)
    return None if found is None else _SHARD.sub("", found) or None


def is_table(name: str) -> bool:
    """Whether a file is CSV, TSV, Parquet or Arrow, by its name."""
    return _without_compression(name).endswith((*_TEXT_TABLES, *TABLE_SUFFIXES))


def _without_compression(name: str) -> str:
    return next((name.removesuffix(end) for end in compressed_names("")[1:] if name.endswith(end)), name)
