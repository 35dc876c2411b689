"""The bytes of files in chunks, decompressed by their names; a file that changes while it is read is an error."""

from __future__ import annotations

import bz2
import errno
import gzip
import io
import logging
import lzma
import os
import stat
import zlib
from collections.abc import Iterator
from typing import IO, Any

from ftk.data.text.paths import compressed_suffix
from ftk.errors import UserError
from ftk.files import FileState, shortened, state_of

logger = logging.getLogger(__name__)

_ZSTD_BYTES = 1 << 10  # decompressed at a time: they can become 32 MiB


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


def read_chunks(path: str, chunk_bytes: int, start: int = 0, stop: int | None = None) -> Iterator[tuple[bytes, int]]:
    """The decompressed bytes of a file, in chunks, each with the bytes of the file on disk read so far."""
    suffix = compressed_suffix(path)
    with _Source(io.FileIO(path), path, start, stop) as source:
        yield from _read_zstd(path, source) if suffix == ".zst" else _read(path, source, suffix, chunk_bytes)
        source.check()


def _read(path: str, source: _Source, suffix: str, chunk_bytes: int) -> Iterator[tuple[bytes, int]]:
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
            return
        yield chunk, source.position


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
