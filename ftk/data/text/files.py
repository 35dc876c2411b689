"""Files of documents as blocks of whole ones, without holding a file in memory.

A line ends at "\\n" and nowhere else. A byte order mark at the start of a file is dropped.
What the documents of a block are is the subject of `records`.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from typing import IO

from ftk.data.text.blocks import BLOCK_BYTES, MAX_DOCUMENT_BYTES, Block, Part, Problem, too_large
from ftk.data.text.chunks import check_unchanged, read_chunks
from ftk.data.text.paths import ROWS, compressed_suffix
from ftk.data.text.tables import read_table
from ftk.files import shortened, state_of

PART_BYTES = 1 << 18  # smaller parts take more time for opening, sending and receiving
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SPACES = b" \t\r\f\v"
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_EMPTY_START = re.compile(rb"(?:[ \t\r\f\v]*\n)+")
_FOREIGN_STARTS = {
    b"\x1f\x8b": ("compressed", "gzip data; rename the file to end in .gz"),
    **{b"BZh%d1AY&SY" % n: ("compressed", "bzip2 data; rename the file to end in .bz2") for n in range(1, 10)},
    b"\xfd7zXZ\x00": ("compressed", "xz data; rename the file to end in .xz"),
    b"\x28\xb5\x2f\xfd": ("compressed", "Zstandard data; rename the file to end in .zst"),
    b"PAR1": ("table", "Parquet data; rename the file to end in .parquet, and read it with `format` auto"),
    b"ARROW1": ("table", "Arrow data; rename the file to end in .arrow, and read it with `format` auto"),
    b"PK\x03\x04": ("compressed", "a zip archive; unpack it"),
    b"\xff\xfe": ("utf16", "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("utf16", "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
}


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
        yield from read_table(path, column, block_bytes)
        return
    line, offset, pending, parts_searched = 1, start, bytearray(), 0
    disk_bytes, skipping, passed = start, False, 0
    for first, (chunk, disk_bytes) in enumerate(read_chunks(path, block_bytes, start, stop)):
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
            line, offset, parts_searched, passed = line + num_lines, offset + num_bytes, 0, passed + num_bytes
            if skipping:
                continue
        end = _last_document_end(pending, kind, parts_searched)
        parts_searched = len(pending)
        if end:
            data = bytes(memoryview(pending)[:end])
            del pending[:end]
            yield Block(path, kind, line, offset, data, disk_bytes, passed=passed)
            line, passed = line + data.count(b"\n"), 0
            offset += end
            parts_searched -= end
        if len(pending) > max_document_bytes:
            problem = too_large(path, line, offset, max_document_bytes)
            yield Block(path, kind, line, offset, b"", disk_bytes, problem)
            num_bytes, num_lines, skipping = _skip_rest(pending, kind)
            line, offset, passed = line + num_lines, offset + num_bytes, passed + num_bytes
    if pending and not skipping:
        yield Block(path, kind, line, offset, bytes(pending), disk_bytes, passed=passed)
    elif passed:  # it tells the lines and bytes that were passed over
        yield Block(path, kind, line, offset, b"", disk_bytes, passed=passed)


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
            magic = file.read(max(map(len, _FOREIGN_STARTS)))
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
    first = None if searched else _EMPTY_START.match(pending)  # lines before the first paragraph of a file
    end = 0 if first is None else first.end()
    # A blank line may have begun in the part searched before.
    start = max(pending.rfind(b"\n", 0, searched), end - 1, 0)
    while (found := _BLANK_LINE.search(pending, start)) is not None:
        end = found.end()
        start = end - 1  # the newline that ends one blank line may begin the next
    return end


def _sniff(path: str, start: bytes) -> Problem | None:
    for magic, (reason, what) in _FOREIGN_STARTS.items():
        if start.startswith(magic):
            return Problem(reason, path, 1, 0, f"the file starts with {magic.hex(' ').upper()}: {what}")
    return None
