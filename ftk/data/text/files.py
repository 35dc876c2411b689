"""Files of documents as blocks of whole ones, decompressed by name, without holding a file in memory.

A line ends at "\\n" and nowhere else. A byte order mark at the start of a file is dropped.
What the documents of a block are is the subject of `records`.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import logging
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ftk.data.text.paths import ROWS, compressed_suffix
from ftk.errors import UserError
from ftk.files import FileState, shortened, state_of

logger = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 17
PART_BYTES = 1 << 18  # smaller parts take more time for opening, sending and receiving
MAX_DOCUMENT_BYTES = 1 << 26
"""Longer documents are not read: a few of them, or one line of a decompression bomb, would take all memory."""
TOO_LARGE = "too_large"
PAIRS = "pairs"
"""The kind of blocks whose rows are two texts each, see `ftk.data.text.pairs`."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACES = b" \t\r\f\v"
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_ZSTD_BYTES = 1 << 10  # decompressed at a time: they can become 32 MiB
_FOREIGN_STARTS = {
    b"\x1f\x8b": ("compressed", "gzip data; rename the file to end in .gz"),
    b"BZh91AY&SY": ("compressed", "bzip2 data; rename the file to end in .bz2"),
    b"\xfd7zXZ\x00": ("compressed", "xz data; rename the file to end in .xz"),
    b"\x28\xb5\x2f\xfd": ("compressed", "Zstandard data; rename the file to end in .zst"),
    b"PAR1": ("table", "Parquet data; rename the file to end in .parquet, and read it with `format` auto"),
    b"ARROW1": ("table", "Arrow data; rename the file to end in .arrow, and read it with `format` auto"),
    b"PK\x03\x04": ("compressed", "a zip archive; unpack it"),
    b"\xff\xfe": ("utf16", "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("utf16", "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
}


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


def read_blocks(
    path: str,
    kind: str,
    block_bytes: int = BLOCK_BYTES,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    *,
    column: str = "text",
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Block]:
    """Reads a file as blocks of about `block_bytes` that end where a document ends.

    Memory use is a few times the larger of `block_bytes` and the longest document, or `max_document_bytes`.

    Args:
        path: file; decompressed if its name ends in .gz, .bz2, .xz or .zst.
        kind: from `kind_of`.
        block_bytes: bytes read at a time.
        max_document_bytes: a longer document is skipped, and a block's `problem` says so; not of a table.
        column: of a table, with the documents.
        start, stop: bytes of a file that is neither compressed nor a table; documents begin at `start` and end at
            `stop`, and lines are counted from `start`. None: up to the end.

    Raises:
        UserError: compressed data or a table is broken, its library or the column is missing.
        OSError: the file cannot be read, or is written to meanwhile.
    """
    if kind == ROWS:
        from ftk.data.text.tables import read_table

        yield from read_table(path, column, block_bytes)
        return
    line, offset, pending, parts_searched = 1, start, bytearray(), 0
    disk_bytes, skipping = start, False
    for first, (chunk, disk_bytes) in enumerate(_read_chunks(path, block_bytes, start, stop)):
        if first == start == 0:
            problem = _sniff(path, chunk)
            if problem is not None:
                yield Block(path, kind, 1, 0, b"", disk_bytes, problem)
                return
            if chunk.startswith(_BYTE_ORDER_MARK):
                chunk, offset = chunk[len(_BYTE_ORDER_MARK) :], len(_BYTE_ORDER_MARK)
        pending += chunk
        if skipping:
            num_bytes, num_lines, skipping = _skip_rest(pending, kind)
            line, offset, parts_searched = line + num_lines, offset + num_bytes, 0
            if skipping:
                continue
        end = _last_document_end(pending, kind, parts_searched)
        parts_searched = len(pending)
        if end:
            data = bytes(memoryview(pending)[:end])
            del pending[:end]
            yield Block(path, kind, line, offset, data, disk_bytes)
            line += data.count(b"\n")
            offset += end
            parts_searched -= end
        if len(pending) > max_document_bytes:
            problem = too_large(path, line, offset, max_document_bytes)
            yield Block(path, kind, line, offset, b"", disk_bytes, problem)
            num_bytes, num_lines, skipping = _skip_rest(pending, kind)
            line, offset = line + num_lines, offset + num_bytes
    if pending and not skipping:
        yield Block(path, kind, line, offset, bytes(pending), disk_bytes)
    elif skipping and stop is not None:  # it tells the number of lines that were passed over
        yield Block(path, kind, line, offset, b"", disk_bytes)


def cut_file(
    path: str,
    kind: str,
    part_bytes: int = PART_BYTES,
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    *,
    column: str = "text",
    start: int = 0,
    stop: int | None = None,
) -> Iterator[Part | Block]:
    """A file as parts that many processes can read, or as blocks where only one can.

    Only one can read compressed files and tables (their bytes are not the text), pipes (which cannot be read twice) and
    documents that end at blank lines.

    Args:
        path: file.
        kind: from `kind_of`.
        part_bytes: bytes of a part; with kind "file", a part is the whole file.
        max_document_bytes, column: as of `read_blocks`.
        start, stop: only what begins in these bytes of the file on disk: parts, paragraphs, or the whole of what cannot
            be cut. None: up to the end. Ranges that make up the file give together what the whole file does.
    """
    is_text = compressed_suffix(path) == "" and stat.S_ISREG(os.stat(path).st_mode) and kind != ROWS
    if is_text:  # a pipe is opened once, by its reader: closed in between, it would end its writer
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            state = state_of(file.fileno())
            magic = file.read(8)
    if not is_text or _sniff(path, magic) is not None:
        if start == 0:
            yield from read_blocks(path, kind, max_document_bytes=max_document_bytes, column=column)
        return
    if kind == "blank-line":
        start, stop = _paragraph_start(path, start), None if stop is None else _paragraph_start(path, stop)
        if stop is None or start < stop:
            yield from read_blocks(path, kind, max_document_bytes=max_document_bytes, start=start, stop=stop)
        return
    first = len(_BYTE_ORDER_MARK) if magic.startswith(_BYTE_ORDER_MARK) else 0
    step = part_bytes if kind != "file" else max(size, 1)
    before = max(0, -(-(start - first) // step)) if start else 0  # parts that begin in the ranges before
    for begin in range(first + before * step, size if stop is None else min(stop, size), step):
        end = min(begin + step, size)
        yield Part(path, kind, begin, end, is_first=begin == first, is_last=end == size, state=state)


def _paragraph_start(path: str, offset: int) -> int:
    """Where a paragraph begins behind the first blank line at or after `offset`: the same for both sides of a cut."""
    if offset == 0:
        return 0
    with open(path, "rb") as file:
        file.seek(offset)
        pending = b""
        while chunk := file.read(BLOCK_BYTES):
            pending += chunk
            found = _BLANK_LINE.search(pending)
            if found is not None:
                return file.tell() - len(pending) + found.end()
            rest = pending[max(pending.rfind(b"\n"), 0) :]
            pending = b"\n" if rest.startswith(b"\n") and not rest.strip(_SPACES + b"\n") else b""
        return file.tell()


def read_part(part: Part, max_document_bytes: int = MAX_DOCUMENT_BYTES) -> Block:
    """The documents that begin in a part; the last of them may reach beyond its end.

    The lines of the block are counted from 1 in each part.

    Args:
        part: from `cut_file`.
        max_document_bytes: where the last document is longer, the block's `problem` says so.

    Raises:
        OSError: the file cannot be read, or has changed since it was cut; if it only grew, a warning is logged.
    """
    before = 0 if part.is_first else 1  # a line that begins at `start` is known by the "\n" before it
    if part.kind == "file" and part.stop - part.start > max_document_bytes:
        whole = too_large(part.source, 1, part.start, max_document_bytes)
        return Block(part.source, part.kind, 1, part.start, b"", part.stop, whole)
    problem: Problem | None = None
    with open(part.source, "rb", buffering=0) as file:
        file.seek(part.start - before)
        data = _read_exactly(file, part.stop - part.start + before, part)
        begin = 0
        if not part.is_first:
            begin = data.find(b"\n", 0, len(data) - 1) + 1 or len(data)
        offset = part.start - before + begin
        if begin < len(data) and part.kind != "file" and not data.endswith(b"\n"):
            last = max(begin, data.rfind(b"\n") + 1)
            rest = _rest_of_line(file, part, max_document_bytes - (len(data) - last))
            if rest is None:
                lines = data.count(b"\n", begin, last)
                problem = too_large(part.source, 1 + lines, offset + last - begin, max_document_bytes)
                data = data[:last]
            else:
                data += rest
        check_unchanged(file, part.source, part.state, warn=part.is_last)
    return Block(part.source, part.kind, 1, offset, data[begin:], part.stop, problem)


def too_large(source: str, line: int, offset: int | None, max_document_bytes: int) -> Problem:
    """The problem of a document that is too large to be read."""
    message = (
        f"a document of more than {max_document_bytes:,} bytes; cut it, raise `max_document_bytes`, "
        "or skip such documents with `on_error` skip"
    )
    return Problem(TOO_LARGE, source, line, offset, message)


def _rest_of_line(file: IO[bytes], part: Part, room: int) -> bytes | None:
    """What follows a part up to the end of the line, or None if that is more than `room` bytes."""
    rest, left = bytearray(), part.state[2] - part.stop
    while left and b"\n" not in rest:
        if len(rest) > room:
            return None
        chunk = _read_exactly(file, min(left, max(1 << 12, len(rest)), max(room, 0) + 2), part)
        rest += chunk
        left -= len(chunk)
    end = rest.find(b"\n") + 1 or len(rest)
    return None if end - rest.endswith(b"\n", 0, end) > room else bytes(rest[:end])


def _read_exactly(file: IO[bytes], size: int, part: Part) -> bytes:
    """`size` bytes: one call gives at most 2 GiB."""
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    if len(data) < size:
        raise shortened(part.source, file.tell(), part.state[2])
    return data


def check_unchanged(file: IO[bytes], source: str, before: FileState, warn: bool = True) -> None:
    """Raises OSError if a file has changed; if it only grew, logs how much of it was read."""
    now = state_of(file.fileno())
    if now == before:
        return
    if now[:2] == before[:2] and now[2] < before[2]:
        raise shortened(source, now[2], before[2])
    if now[:2] != before[:2] or now[2] == before[2]:
        raise OSError(errno.EIO, "File changed while it was read (run again when nothing writes to it)", source)
    if warn:
        logger.warning(
            "%s: grew from %s to %s bytes while it was read; the first %s were read",
            *(source, f"{before[2]:,}", f"{now[2]:,}", f"{before[2]:,}"),
        )


def _skip_rest(pending: bytearray, kind: str) -> tuple[int, int, bool]:
    """Removes the rest of a document that is too large.

    Returns:
        bytes and line ends that were removed, and whether the document continues after them.
    """
    continues, kept = True, b""
    if kind == "blank-line":
        found = _BLANK_LINE.search(pending)
        end = len(pending) if found is None else found.end()
        continues = found is None
        if continues and b"\n" in pending and not pending[pending.rfind(b"\n") :].strip(_SPACES + b"\n"):
            kept = b"\n"  # a blank line may follow
    else:
        end = (pending.find(b"\n") + 1 or len(pending)) if kind != "file" else len(pending)
        continues = kind == "file" or not pending.endswith(b"\n", 0, end)
    num_lines = pending.count(b"\n", 0, end) - len(kept)
    pending[:end] = kept
    return end - len(kept), num_lines, continues


def _last_document_end(pending: bytearray, kind: str, searched: int) -> int:
    """Where the last whole document in `pending` ends, or 0; none did in its first `searched` bytes."""
    if kind == "file":
        return 0
    if kind != "blank-line":
        return pending.rfind(b"\n", searched) + 1
    start = max(pending.rfind(b"\n", 0, searched), 0)  # a blank line may have begun in the part searched before
    end = 0
    while (found := _BLANK_LINE.search(pending, start)) is not None:
        end = found.end()
        start = end - 1  # the newline that ends one blank line may begin the next
    return end


def _sniff(path: str, start: bytes) -> Problem | None:
    for magic, (reason, what) in _FOREIGN_STARTS.items():
        if start.startswith(magic):
            return Problem(reason, path, 1, 0, f"the file starts with {magic.hex(' ').upper()}: {what}")
    return None


class _Source(io.RawIOBase):
    """A file of the length that it had when it was opened, or a pipe; unbuffered.

    A buffered read from a pipe loops in C, which ignores Ctrl-C until data arrive.
    """

    def __init__(self, file: io.FileIO, path: str, start: int = 0, stop: int | None = None) -> None:
        self._path, self._file = path, file
        self._state = state_of(self._file.fileno())
        self._is_regular = stat.S_ISREG(os.fstat(self._file.fileno()).st_mode)
        self.position = start  # stays at 0 in a pipe
        self._stop = self._state[2] if stop is None else min(stop, self._state[2])
        if start:
            self._file.seek(start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._is_regular:
            return self._file.readinto(buffer)
        count = self._file.readinto(memoryview(buffer)[: self._stop - self.position])
        if not count and len(buffer) and self.position < self._stop:
            raise shortened(self._path, self.position, self._state[2])
        self.position += count
        return count

    def check(self) -> None:
        """Raises OSError if the file has changed."""
        if self._is_regular:
            check_unchanged(self._file, self._path, self._state)

    def close(self) -> None:
        self._file.close()
        super().close()


def _read_chunks(path: str, chunk_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[bytes, int]]:
    """The decompressed bytes of a file, in chunks, each with the bytes of the file on disk read so far."""
    suffix = compressed_suffix(path)
    with _Source(io.FileIO(path), path, start, stop) as source:
        if suffix == ".zst":
            yield from _read_zstd(path, source)
        else:
            openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
            reader = openers[suffix](source) if suffix else source
            while True:
                try:
                    chunk = reader.read(chunk_bytes)
                except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                    if not suffix or (isinstance(error, OSError) and error.errno is not None):
                        raise
                    raise broken(path, suffix, error) from error
                if not chunk:
                    break
                yield chunk, source.position
        source.check()


def _read_zstd(path: str, raw: _Source) -> Iterator[tuple[bytes, int]]:
    # Not the library's stream reader: it accepts a truncated file as whole.
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: reading Zstandard files needs one more package; pip install 'ftk[zstd]'") from None
    frame = None
    while data := raw.read(_ZSTD_BYTES):
        while data:
            if frame is None:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                chunk = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise broken(path, ".zst", error) from error
            if chunk:
                yield chunk, raw.position
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise broken(path, ".zst", EOFError("the file ends inside a frame"))


def broken(path: str, suffix: str, error: BaseException) -> UserError:
    what = " ".join(str(error).split())
    return UserError(f"{path}: not whole {suffix} data ({what}); the file is truncated, altered or misnamed")
