"""Pairs of texts, as of a translation: lines of two files, or two fields of a JSON object on each line.

On its way to the tokenizer a pair is one document: its two texts with a NUL between them, which text does not hold.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ftk.data.text.blocks import BLOCK_BYTES, PAIRS, Block, Problem
from ftk.data.text.files import read_blocks
from ftk.data.text.paths import compressed_names, kind_of
from ftk.data.text.preprocess_config import InputConfig
from ftk.data.text.records import clean_texts, parse_block
from ftk.errors import UserError, counted

SEPARATOR = "\0"


def expand_pairs(names: str, inputs: InputConfig) -> list[tuple[str, str]]:
    """The two files of each of a comma-separated list of prefixes; for a file of JSON lines that file twice.

    Raises:
        UserError: a file is missing, or is not of JSON lines.
    """
    found = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if os.path.isfile(name):
            if kind_of(name, inputs.format) != "jsonl":
                raise UserError(
                    f"{name}: pairs are JSON lines, or lines of two files; for {name}.{inputs.source_lang} and "
                    f"{name}.{inputs.target_lang} give their common beginning"
                )
            found.append((name, name))
            continue
        found.append((_side(f"{name}.{inputs.source_lang}"), _side(f"{name}.{inputs.target_lang}")))
    if not found:
        raise UserError(f"{names!r} names no file")
    return found


def _side(path: str) -> str:
    there = [found for found in compressed_names(path) if os.path.isfile(found)]
    if not there:
        raise UserError(f"{path}: no such file; pairs are lines of two files, PREFIX.SOURCE and PREFIX.TARGET")
    return there[0]


def read_pairs(files: Sequence[str], inputs: InputConfig) -> Iterator[Block]:
    """The pairs of two files as blocks of kind `PAIRS`; with `on_error` raise the first problem ends the last one.

    Raises:
        UserError: the files have different numbers of lines.
    """
    assert inputs.source_lang is not None
    assert inputs.target_lang is not None
    is_json = files[0] == files[1]
    kind = "jsonl" if is_json else "line"
    keys = (inputs.source_lang, inputs.target_lang) if is_json else ("text", "text")
    sources, targets = (
        _records(path, kind, key, inputs.max_document_bytes) for path, key in zip(files, keys, strict=True)
    )
    waiting: list[bytes] = []
    num_bytes = disk_bytes = 0

    def block(problem: Problem | None = None) -> Block:
        nonlocal waiting, num_bytes
        sizes = np.array([len(pair) for pair in waiting], dtype=np.int64)
        made = Block(files[0], PAIRS, 1, 0, b"".join(waiting), disk_bytes, problem, sizes)
        waiting, num_bytes = [], 0
        return made

    for number, (source, target) in enumerate(itertools.zip_longest(sources, targets)):
        if source is None or target is None:
            raise _uneven(files, number, sources if target is None else targets, target is None)
        disk_bytes = source[1]
        problem = next((text for text in (source[0], target[0]) if isinstance(text, Problem)), None)
        if problem is not None:
            yield block(problem)
            if inputs.on_error == "raise" or problem.reason in _WHOLE_FILE:
                return
            continue
        waiting.append(f"{source[0]}{SEPARATOR}{target[0]}".encode())
        num_bytes += len(waiting[-1])
        if num_bytes >= BLOCK_BYTES:
            yield block()
    if waiting:
        yield block()


_WHOLE_FILE = ("compressed", "utf16", "table")
"""Problems after which a file cannot be read on."""


def _records(path: str, kind: str, key: str, max_document_bytes: int) -> Iterator[tuple[str | Problem, int]]:
    """The text of each line, empty ones included, and the bytes of the file read so far."""
    for block in read_blocks(path, kind, max_document_bytes=max_document_bytes):
        texts: Iterable[str | Problem] | None = clean_texts(block, key, max_document_bytes)
        if texts is None:
            parsed = parse_block(block, key, max_document_bytes)
            texts = (record if isinstance(record, Problem) else record.text for record in parsed)
        for text in texts:
            yield text, block.disk_bytes


def _uneven(files: Sequence[str], number: int, longer: Iterator[object], is_source: bool) -> UserError:
    lines = counted(number, "line"), counted(number + 1 + sum(1 for _ in longer), "line")
    source, target = lines[::-1] if is_source else lines
    return UserError(
        f"{files[0]} has {source}, {files[1]} {target}; line N of one is the translation of line N of the other"
    )


def texts_of(paths: Iterable[Sequence[str]], inputs: InputConfig) -> Iterator[str]:
    """The pairs of files that can be read, each as one text."""
    for files in paths:
        for block in read_pairs(files, inputs):
            for record in parse_block(block):
                if not isinstance(record, Problem):
                    yield record.text
                elif inputs.on_error == "raise":
                    raise UserError(str(record))


def is_pair(text: str) -> bool:
    """Whether both texts of a pair have more than white space."""
    return all(part and not part.isspace() for part in text.split(SEPARATOR))
