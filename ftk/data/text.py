"""Text files as blocks of whole documents, decompressed by name, without holding a file in memory.

A line ends at "\\n" and nowhere else. A byte order mark at the start of a file is dropped.
What the documents of a block are is the subject of `records`.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import re
import stat
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from ftk.errors import UserError

BLOCK_BYTES = 1 << 17
PART_BYTES = 1 << 18  # half of it costs a twentieth more time: for opening, sending and receiving
SEPARATORS = ("line", "blank-line", "file")
FORMATS = ("auto", "text", "jsonl")
_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BLANK_LINE = re.compile(rb"\n[ \t\r\f\v]*\n")
_FOREIGN_STARTS = {
    b"\x1f\x8b": ("compressed", "gzip data; rename the file to end in .gz"),
    b"BZh91AY&SY": ("compressed", "bzip2 data; rename the file to end in .bz2"),
    b"\xfd7zXZ\x00": ("compressed", "xz data; rename the file to end in .xz"),
    b"\x28\xb5\x2f\xfd": ("compressed", "Zstandard data; rename the file to end in .zst"),
    b"PK\x03\x04": ("compressed", "a zip archive; unpack it"),
    b"\xff\xfe": ("utf16", "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("utf16", "UTF-16 text; convert it to UTF-8: iconv -f UTF-16 -t UTF-8"),
}


class Problem(NamedTuple):
    """What is wrong with one document, or with a whole file.

    Attributes:
        reason: a short name to count by, e.g. "invalid_utf8".
        source, line, offset: file as given, line from 1, byte offset in the (decompressed) file.
        message: what is wrong and how to mend it.
    """

    reason: str
    source: str
    line: int
    offset: int
    message: str

    def __str__(self) -> str:
        return f"{self.source}:{self.line}: (byte {self.offset}) {self.message}"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole documents of one file, still as bytes.

    Attributes:
        source: the file, as given.
        kind: how documents are told apart: a separator ("line", "blank-line", "file") or "jsonl".
        line, offset: line number (from 1) and byte offset of the first byte of `data`.
        data: the bytes.
        disk_bytes: how far the file on disk had been read, for progress.
        problem: the file as a whole cannot be read as text; `data` is empty then.
    """

    source: str
    kind: str
    line: int
    offset: int
    data: bytes
    disk_bytes: int
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a file, for `read_part`: the documents that begin in it.

    Attributes:
        source, kind: as in `Block`.
        start, stop: byte offsets; `start` of the first part is where the text begins.
        is_first, is_last: there is no part before it, or behind it.
    """

    source: str
    kind: str
    start: int
    stop: int
    is_first: bool
    is_last: bool

    @property
    def disk_bytes(self) -> int:
        """How far the file has been read with this part."""
        return self.stop


def expand_paths(files: str, separator: str = "line") -> list[str]:
    """The files that a comma-separated list names; with separator "file", folders mean the files in them.

    Raises:
        UserError: a file is missing, or a folder where a file is meant.
    """
    paths: list[str] = []
    for name in filter(None, (part.strip() for part in files.split(","))):
        path = Path(name)
        if not path.exists():
            raise UserError(f"{name}: no such file")
        if not path.is_dir():
            paths.append(name)
        elif separator == "file":
            paths += sorted(str(file) for file in path.rglob("*") if file.is_file())
        else:
            raise UserError(
                f"{name}: a folder, not a file; name its files, separated by commas, "
                "or make each file in it a document with --document-separator file"
            )
    if not paths:
        raise UserError(f"{files!r} names no file")
    return paths


def kind_of(path: str, format: str = "auto", separator: str = "line") -> str:
    """How the documents of a file are told apart: "jsonl" by format or name, else the separator."""
    stem = path[: -len(suffix)] if (suffix := compressed_suffix(path)) else path
    if format == "jsonl" or (format == "auto" and stem.lower().endswith(_JSONL_SUFFIXES)):
        return "jsonl"
    return separator


def compressed_suffix(path: str) -> str:
    """ ".gz", ".bz2", ".xz" or ".zst" if the name ends so, else ""."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix if suffix in _COMPRESSED_SUFFIXES else ""


def read_blocks(path: str, kind: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """Reads a file as blocks of about `block_bytes` that end where a document ends.

    Memory use is a few times the larger of `block_bytes` and the longest document.

    Args:
        path: file; decompressed if its name ends in .gz, .bz2, .xz or .zst.
        kind: from `kind_of`.
        block_bytes: bytes read at a time.

    Raises:
        UserError: compressed data is broken or its library is missing.
    """
    line, offset, pending, parts_searched = 1, 0, bytearray(), 0
    disk_bytes = 0
    for first, (chunk, disk_bytes) in enumerate(_read_chunks(path, block_bytes)):
        if first == 0:
            problem = _sniff(path, chunk)
            if problem is not None:
                yield Block(path, kind, 1, 0, b"", disk_bytes, problem)
                return
            if chunk.startswith(_BYTE_ORDER_MARK):
                chunk, offset = chunk[len(_BYTE_ORDER_MARK) :], len(_BYTE_ORDER_MARK)
        pending += chunk
        end = _last_document_end(pending, kind, parts_searched)
        parts_searched = len(pending)
        if end:
            data = bytes(memoryview(pending)[:end])
            del pending[:end]
            yield Block(path, kind, line, offset, data, disk_bytes)
            line += data.count(b"\n")
            offset += end
            parts_searched -= end
    if pending:
        yield Block(path, kind, line, offset, bytes(pending), disk_bytes)


def cut_file(path: str, kind: str, part_bytes: int = PART_BYTES) -> Iterator[Part | Block]:
    """A file as parts that many processes can read, or as blocks where only one can.

    One must where the bytes of the file are not the text (compressed files), where they cannot be read twice
    (pipes) and where documents end at blank lines.

    Args:
        path: file.
        kind: from `kind_of`.
        part_bytes: bytes of a part; with kind "file", a part is the whole file.
    """
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        whole = compressed_suffix(path) == "" and stat.S_ISREG(status.st_mode) and kind != "blank-line"
        start = file.read(8) if whole else b""
    problem = _sniff(path, start)
    if not whole or problem is not None:
        yield from read_blocks(path, kind)
        return
    first = len(_BYTE_ORDER_MARK) if start.startswith(_BYTE_ORDER_MARK) else 0
    size = status.st_size
    step = part_bytes if kind != "file" else max(size, 1)
    for begin in range(first, size, step):
        end = min(begin + step, size)
        yield Part(path, kind, begin, end, is_first=begin == first, is_last=end == size)


def read_part(part: Part) -> Block:
    """The documents that begin in a part; the last of them may reach beyond its end.

    The lines of the block are counted from 1 in each part.
    """
    before = 0 if part.is_first else 1  # a line that begins at `start` is known by the "\n" before it
    with open(part.source, "rb", buffering=0) as file:
        file.seek(part.start - before)
        data = _read_exactly(file, part.stop - part.start + before)
        begin = 0
        if not part.is_first:
            begin = data.find(b"\n", 0, len(data) - 1) + 1 or len(data)
        rest = b""
        if begin < len(data) and part.kind != "file" and not data.endswith(b"\n"):
            rest = _rest_of_line(file)
    offset = part.start - before + begin
    return Block(part.source, part.kind, 1, offset, b"".join((memoryview(data)[begin:], rest)), part.stop)


def _rest_of_line(file: IO[bytes]) -> bytes:
    rest = bytearray()
    while b"\n" not in rest and (chunk := file.read(max(1 << 12, len(rest)))):
        rest += chunk
    return bytes(rest[: rest.find(b"\n") + 1 or len(rest)])


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    """`size` bytes, fewer only at the end of the file: one call gives at most 2 GiB."""
    data = file.read(size)
    while len(data) < size and (more := file.read(size - len(data))):
        data += more
    return data


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


def _read_chunks(path: str, chunk_bytes: int) -> Iterator[tuple[bytes, int]]:
    """The decompressed bytes of a file, in chunks, each with how far the file on disk has been read."""
    suffix = compressed_suffix(path)
    # Unbuffered: a buffered read from a pipe loops in C, where Ctrl-C goes unheard until the next data.
    with open(path, "rb", buffering=0) as raw:
        if suffix == ".zst":
            yield from _read_zstd(path, raw)
            return
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        reader = openers[suffix](raw) if suffix else raw
        seekable = raw.seekable()
        while True:
            try:
                chunk = reader.read(chunk_bytes)
            except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                if not suffix or (isinstance(error, OSError) and error.errno is not None):
                    raise
                raise _broken(path, suffix, error) from error
            if not chunk:
                return
            yield chunk, raw.tell() if seekable else 0


def _read_zstd(path: str, raw: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    # Not the library's stream reader: it takes a truncated file for a whole one.
    try:
        import zstandard
    except ImportError:
        raise UserError(f"{path}: reading Zstandard files needs one more package; pip install 'ftk[zstd]'") from None
    frame = None
    position = 0
    while data := raw.read(1 << 16):
        position += len(data)
        while data:
            if frame is None:
                frame = zstandard.ZstdDecompressor().decompressobj()
            try:
                chunk = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise _broken(path, ".zst", error) from error
            if chunk:
                yield chunk, position
            data = frame.unused_data if frame.eof else b""
            if frame.eof:
                frame = None
    if frame is not None:
        raise _broken(path, ".zst", EOFError("the file ends inside a frame"))


def _broken(path: str, suffix: str, error: BaseException) -> UserError:
    return UserError(f"{path}: not whole {suffix} data ({error}); the file is truncated, altered or misnamed")
