"""What reading files gives: blocks of whole documents, parts of files to be read elsewhere, and problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ftk.files import FileState

BLOCK_BYTES = 1 << 17
MAX_DOCUMENT_BYTES = 1 << 26
"""Longer documents are not read: a few of them, or one line of a decompression bomb, would take all memory."""
TOO_LARGE = "too_large"
PAIRS = "pairs"
"""The kind of blocks whose rows are two texts each, see `ftk.data.text.pairs`."""


class Problem(NamedTuple):
    """What is wrong with one document, or with a whole file.

    Attributes:
        reason: a short name to count by, e.g. "invalid_utf8".
        source, line, offset: file as given, line from 1, byte offset in the (decompressed) file; of a table the row
            from 1, and no offset. Line 0: not known, since reading began within the file.
        message: what is wrong and how to correct it.
    """

    reason: str
    source: str
    line: int
    offset: int | None
    message: str

    def __str__(self) -> str:
        if self.offset is None:
            return f"{self.source}: row {self.line}: {self.message}"
        line = f":{self.line}" if self.line else ""
        return f"{self.source}{line}: (byte {self.offset}) {self.message}"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole documents of one file, still as bytes.

    Attributes:
        source: the file, as given.
        kind: how the file is divided into documents: a separator ("line", "blank-line", "file"), "jsonl", `ROWS` or
            `PAIRS`.
        line, offset: line number (from 1) and byte offset of the first byte of `data`; of a table the number of the
            first row (from 1), and 0.
        data: the bytes; of a table those of all rows back to back.
        disk_bytes: bytes of the file on disk read so far, for progress.
        problem: what cannot be read after `data`: a document that is too large, or the file as a whole.
        passed: bytes of documents that are too large between the block before and `data`.
        sizes: bytes of each row, int64 [rows], -1 where it holds null; None unless `kind` is `ROWS` or `PAIRS`.
    """

    source: str
    kind: str
    line: int
    offset: int
    data: bytes
    disk_bytes: int
    problem: Problem | None = None
    sizes: npt.NDArray[np.int64] | None = None
    passed: int = 0

    @property
    def num_lines(self) -> int:
        """Line ends in the part of the file that this block covers."""
        return self.data.count(b"\n") + (self.problem is not None)


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a file, for `read_part`: the documents that begin in it.

    Attributes:
        source, kind: as in `Block`.
        start, stop: byte offsets; `start` of the first part is where the text begins.
        is_first, is_last: whether it is the first or the last part of the file.
        state: of the file when it was cut.
    """

    source: str
    kind: str
    start: int
    stop: int
    is_first: bool
    is_last: bool
    state: FileState

    @property
    def disk_bytes(self) -> int:
        """Bytes of the file read when this part has been."""
        return self.stop


def too_large(source: str, line: int, offset: int | None, max_document_bytes: int) -> Problem:
    """The problem of a document that is too large to be read."""
    message = (
        f"a document of more than {max_document_bytes:,} bytes; cut it, raise `max_document_bytes`, "
        "or skip such documents with `on_error` skip"
    )
    return Problem(TOO_LARGE, source, line, offset, message)
