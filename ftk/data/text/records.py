"""Documents within a block of text: lines, paragraphs, files, JSON objects; what cannot be read is named."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

from ftk.data.text.blocks import MAX_DOCUMENT_BYTES, PAIRS, Block, Problem, too_large
from ftk.data.text.files import read_blocks
from ftk.data.text.paths import ROWS, kind_of
from ftk.data.text.preprocess_config import TextConfig
from ftk.errors import UserError
from ftk.parsing import JSON_TYPES, how_to_convert, json_fault

SKIP = "or skip such documents with `on_error` skip"
"""How messages of documents that cannot be read end."""
# Numbers become floats: their values are never used, and whole numbers of thousands of digits are refused.
_DECODER = json.JSONDecoder(parse_int=float)


class Document(NamedTuple):
    """One document and its place: line from 1, byte offset in the (decompressed) file; or row from 1, no offset."""

    text: str
    source: str
    line: int
    offset: int | None


def read_documents(
    paths: Iterable[str],
    options: TextConfig,
    format: str = "auto",
    on_problem: Callable[[Problem], None] = lambda problem: None,
) -> Iterator[Document]:
    """Reads the documents of text files one after another; empty ones are left out.

    Args:
        paths: of text, or tables; see `paths.expand_paths`.
        options: what a document is, and whether one that cannot be read is an error.
        format: "auto" (JSONL by the name), "text" or "jsonl".
        on_problem: called with each document that is skipped because it cannot be read.

    Raises:
        UserError: at the first document that cannot be read, unless `options.on_error` is "skip".
    """
    most = options.max_document_bytes
    for path in paths:
        kind = kind_of(path, format, options.document_separator)
        for block in read_blocks(path, kind, max_document_bytes=most, column=options.text_key):
            for record in parse_block(block, options.text_key, most):
                if isinstance(record, Problem):
                    if options.on_error == "raise":
                        raise UserError(str(record))
                    on_problem(record)
                elif not is_empty(record.text):
                    yield record


def is_empty(text: str) -> bool:
    """Whether a document holds nothing but white space (as Unicode has it)."""
    return not text or text.isspace()


def parse_block(
    block: Block, text_key: str = "text", max_document_bytes: int = MAX_DOCUMENT_BYTES
) -> Iterator[Document | Problem]:
    """The documents of a block in their order, empty ones included; a `Problem` where one cannot be read."""
    if block.kind == PAIRS:
        yield from (Document(pair, block.source, block.line, None) for pair in _clean_pairs(block))
        if block.problem is not None:
            yield block.problem
        return
    if block.sizes is not None:
        yield from _parse_rows(block, block.sizes.tolist(), text_key, max_document_bytes)
        return
    for line, start, data in _cut(block) if block.data else ():
        if len(data) > max_document_bytes:
            yield too_large(block.source, line, block.offset + start, max_document_bytes)
            continue
        text = _decode(block.source, line, block.offset + start, data)
        if isinstance(text, str) and "\r" in text:
            text = text.replace("\r\n", "\n").removesuffix("\r")
        if isinstance(text, str) and block.kind == "jsonl" and not is_empty(text):
            text = _text_of_json(text, text_key, block.source, line, block.offset + start)
        if isinstance(text, Problem):
            yield text
        else:
            yield Document(text, block.source, line, block.offset + start)
    if block.problem is not None:
        yield block.problem


def clean_texts(block: Block, text_key: str = "text", max_document_bytes: int = MAX_DOCUMENT_BYTES) -> list[str] | None:
    """The texts of a block, empty ones included, some fifteen times faster than `parse_block` reads them.

    Returns:
        the texts, or None where `parse_block` is needed: something cannot be read, or documents are not lines.
    """
    if block.kind == PAIRS and block.problem is None:
        return _clean_pairs(block)
    if block.problem is not None or block.kind not in ("line", "jsonl", ROWS) or b"\0" in block.data:
        return None
    if block.sizes is not None:
        return _clean_rows(block, block.sizes.tolist(), max_document_bytes)
    if len(block.data) > max_document_bytes < max(map(len, block.data.split(b"\n"))):
        return None
    if block.kind == "jsonl":
        lines = block.data.removesuffix(b"\n").split(b"\n") if block.data else []
        loads = _orjson()
        found = [_clean_json_text(line, text_key, loads) for line in lines]
        return None if None in found else cast("list[str]", found)
    try:
        text = block.data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    texts = text.split("\n")
    if not texts[-1]:
        texts.pop()
    return [text.removesuffix("\r") for text in texts] if "\r" in text else texts


def _clean_rows(block: Block, sizes: list[int], max_document_bytes: int) -> list[str] | None:
    if not 0 <= min(sizes, default=0) <= max(sizes, default=0) <= max_document_bytes:
        return None
    try:
        return _rows_of(block, sizes)
    except UnicodeDecodeError:
        return None


def _clean_pairs(block: Block) -> list[str]:
    """The texts of a block of pairs, which were checked when they were read."""
    assert block.sizes is not None
    return _rows_of(block, block.sizes.tolist())


def _rows_of(block: Block, sizes: list[int]) -> list[str]:
    ends = list(itertools.accumulate(sizes, initial=0))
    return [block.data[start:end].decode("utf-8") for start, end in itertools.pairwise(ends)]


def _parse_rows(block: Block, sizes: list[int], column: str, max_document_bytes: int) -> Iterator[Document | Problem]:
    start = 0
    for row, size in enumerate(sizes, start=block.line):
        text: str | Problem
        if size < 0:
            text = Problem("null", block.source, row, None, f'the column "{column}" is null; fill it, {SKIP}')
        elif size > max_document_bytes:
            text = too_large(block.source, row, None, max_document_bytes)
        else:
            text = _decode(block.source, row, 0, block.data[start : start + size])
        if isinstance(text, Problem):
            yield text._replace(line=row, offset=None)
        else:
            yield Document(text, block.source, row, None)
        start += max(size, 0)


def _orjson() -> Callable[[bytes], Any] | None:
    """Its `loads`, which takes a third of the time of the standard library's, where it is installed."""
    try:
        import orjson
    except ImportError:
        return None
    return orjson.loads


def _clean_json_text(line: bytes, key: str, loads: Callable[[bytes], Any] | None) -> str | None:
    """The text of one line, "" for an empty line, None where something is wrong with it."""
    if loads is not None:
        try:
            text = loads(line)[key]  # refuses invalid UTF-8 and half a surrogate pair, too
        except (ValueError, TypeError, KeyError):
            pass  # what it refuses may still be read below: NaN
        else:
            return text if isinstance(text, str) and "\0" not in text else None
    try:
        line_text = line.decode()
    except UnicodeDecodeError:
        return None
    found = "" if is_empty(line_text) else _text_of_json(line_text, key, "", 0, 0)
    return found if isinstance(found, str) else None


def _cut(block: Block) -> Iterator[tuple[int, int, bytes]]:
    """(line number, offset in the block, bytes without the last line end) of each document."""
    if block.kind == "file":
        yield block.line, 0, block.data.removesuffix(b"\n")
        return
    paragraph: list[bytes] = []
    first_line, first_start = block.line, 0
    for line, start, data in _lines(block):
        if block.kind != "blank-line":
            yield line, start, data
        elif data.strip(b" \t\r\f\v"):
            if not paragraph:
                first_line, first_start = line, start
            paragraph.append(data)
        elif paragraph:
            yield first_line, first_start, b"\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield first_line, first_start, b"\n".join(paragraph)


def _lines(block: Block) -> Iterator[tuple[int, int, bytes]]:
    start = 0
    for line, data in enumerate(io.BytesIO(block.data), start=block.line):
        yield line, start, data.removesuffix(b"\n")
        start += len(data)


def _decode(source: str, line: int, offset: int, data: bytes) -> str | Problem:
    nul = data.find(b"\0")
    if nul >= 0:
        line += data.count(b"\n", 0, nul)
        message = f"a NUL byte, which is not text (UTF-16 or binary data?); convert the file to UTF-8, {SKIP}"
        return Problem("nul", source, line, offset + nul, message)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line += data.count(b"\n", 0, error.start)
        what = f"invalid UTF-8 (0x{data[error.start]:02X}: {error.reason})"
        message = f"{what}; convert the file to UTF-8, {how_to_convert(data)}, {SKIP}"
        return Problem("invalid_utf8", source, line, offset + error.start, message)
    return text


def _text_of_json(line_text: str, key: str, source: str, line: int, offset: int) -> str | Problem:
    def problem(reason: str, message: str, at: int = 0) -> Problem:
        return Problem(reason, source, line, offset + len(line_text[:at].encode()), f"{message}, {SKIP}")

    try:
        value: Any = _DECODER.decode(line_text)
    except json.JSONDecodeError as error:
        what = "more than one JSON value" if error.msg == "Extra data" else f"not JSON ({json_fault(error)})"
        is_object = error.msg != "Extra data" and re.fullmatch(r"\s*\{.*\}\s*", line_text, re.S)
        remedy = "correct it" if is_object else _one_per_line(line_text)
        return problem("invalid_json", f"{what}; {remedy}", error.pos)
    except RecursionError:
        return problem("invalid_json", "JSON nested too deeply; flatten it")
    if not isinstance(value, dict):
        what = f"{_json_type(value)}, not an object"
        remedy = _one_per_line(line_text) if isinstance(value, list) else f'write {{"{key}": "..."}} on each line'
        return problem("not_an_object", f"{what}; {remedy}")
    if key not in value:
        fields = ", ".join(f'"{name}"' for name in list(value)[:8]) or "none"
        return problem("missing_key", f'no field "{key}" (fields: {fields}); choose one with `text_key`')
    text = value[key]
    if not isinstance(text, str):
        return problem("wrong_type", f'field "{key}" is {_json_type(text)}, not a string; choose one with `text_key`')
    if "\0" in text:
        return problem("nul", f'field "{key}" holds a NUL character, which text does not; take it out')
    if "\\u" in line_text and not _is_well_formed(text):
        return problem("lone_surrogate", f'field "{key}" holds half a surrogate pair (\\uD800 to \\uDFFF); correct it')
    return text


def _one_per_line(line: str) -> str:
    """What makes JSON Lines of a file that holds one value over many lines, or a list."""
    values = "'.[]'" if line.lstrip().startswith("[") else "."
    return f"write one object on each line (jq -c {values} FILE does)"


def _is_well_formed(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _json_type(value: Any) -> str:
    return JSON_TYPES.get(type(value), "a string")
