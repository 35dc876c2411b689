"""Parquet and Arrow files: one column of text, in blocks of rows, or whole rows; the package pyarrow reads them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import numpy as np

from ftk.data.text.blocks import BLOCK_BYTES, Block
from ftk.data.text.chunks import broken, check_unchanged
from ftk.data.text.paths import ROWS
from ftk.errors import UserError
from ftk.files import state_of

_MAX_ROWS = 1024  # decoded at a time
_BUFFER_BYTES = 1 << 20  # read at a time


def read_table(path: str, column: str, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
    """The rows of one column, in blocks of about `block_bytes`.

    Of Parquet only the pages of the column are read, and at most 1,024 rows are in memory; of Arrow one record batch,
    as its writer has made it.

    Args:
        path: file; Arrow in either form, stream or file.
        block_bytes: text of a block; a longer row is a block of its own.

    Raises:
        UserError: pyarrow or the column is missing, the column holds no text, or the file is not whole.
        OSError: the file cannot be read, or is written to meanwhile.
    """
    with _opened(path) as file:
        size, row = os.fstat(file.fileno()).st_size, 1
        for array, share in (_parquet if _is_parquet(path) else _arrow)(path, file, column):
            step = max(1, len(array) * block_bytes // max(array.nbytes, 1))
            for first in range(0, len(array), step):
                part = array.slice(first, step)
                yield _block(path, part, row, int(share * size))
                row += len(part)


def read_records(path: str) -> Iterator[dict[str, Any]]:
    """The rows with all their columns, as Python's values.

    Raises:
        UserError, OSError: as `read_table`.
    """
    with _opened(path) as file:
        if _is_parquet(path):
            import pyarrow.parquet

            batches = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True).iter_batches(_MAX_ROWS)
        else:
            batches = _record_batches(path, file)
        row = 1
        for batch in batches:
            names = batch.schema.names
            if len({*names}) < len(names):
                raise UserError(f"{path}: has duplicate column names ({', '.join(names)}); rename one")
            try:
                yield from batch.to_pylist()
            except (ValueError, OverflowError) as error:  # text that is not UTF-8, or a time too far away
                raise UserError(f"{path}: rows {row} to {row + len(batch) - 1} cannot be read ({error})") from error
            row += len(batch)


def _is_parquet(path: str) -> bool:
    return path.lower().endswith(".parquet")


@contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    """The file; what pyarrow says of it becomes a user's error."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"{path}: reading Parquet and Arrow files needs one more package; pip install 'ftk[data]'"
        ) from None
    with open(path, "rb") as file:
        state = state_of(file.fileno())
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise UserError(f"{path}: a table is read from a regular file, not from a pipe")
        try:
            yield file
        except (pyarrow.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise
            check_unchanged(file, path, state)
            raise broken(path, ".parquet" if _is_parquet(path) else ".arrow", error) from error
        check_unchanged(file, path, state)


def _block(source: str, array: Any, row: int, disk_bytes: int) -> Block:
    """Rows of an array of strings as a block; `row` is the number of the first, from 1."""
    import pyarrow

    nulls = array.is_null().to_numpy(zero_copy_only=False)  # [rows] bool
    binary = array.cast(pyarrow.large_binary()).fill_null(b"")
    _, offsets, data = binary.buffers()
    ends = np.frombuffer(offsets, np.int64, count=len(binary) + 1, offset=8 * binary.offset)  # [rows + 1]
    content = b"" if data is None else data[int(ends[0]) : int(ends[-1])].to_pybytes()
    return Block(source, ROWS, row, 0, content, disk_bytes, sizes=np.where(nulls, -1, np.diff(ends)))


def _parquet(path: str, file: IO[bytes], column: str) -> Iterator[tuple[Any, float]]:
    """Arrays of the column, and the share of the file that is read with each."""
    import pyarrow.parquet

    # No `memory_map`: a file that becomes shorter would end the process by SIGBUS.
    table = pyarrow.parquet.ParquetFile(
        file, buffer_size=_BUFFER_BYTES, pre_buffer=False, page_checksum_verification=True
    )
    _check_column(path, table.schema_arrow, column)
    metadata, done = table.metadata, 0
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    text_bytes = sum(
        chunk.total_uncompressed_size
        for group in groups
        for chunk in map(group.column, range(group.num_columns))
        if chunk.path_in_schema == column
    )
    rows = min(_MAX_ROWS, max(1, _BUFFER_BYTES * metadata.num_rows // max(text_bytes, 1)))
    for batch in table.iter_batches(batch_size=rows, columns=[column], use_threads=False):
        done += batch.num_rows
        yield _plain(batch.column(0)), done / max(metadata.num_rows, 1)


def _arrow(path: str, file: IO[bytes], column: str) -> Iterator[tuple[Any, float]]:
    """Arrays of the column, and the share of the file that is read with each."""
    size = os.fstat(file.fileno()).st_size
    for batch in _record_batches(path, file, column):
        yield _plain(batch.column(0)), file.tell() / max(size, 1)


def _record_batches(path: str, file: IO[bytes], column: str | None = None) -> Iterator[Any]:
    """The record batches of an Arrow file or stream; of one column, if it is given."""
    from pyarrow import ipc

    size = os.fstat(file.fileno()).st_size
    is_stream = file.read(6) != b"ARROW1"
    if is_stream:
        file.seek(max(0, size - 4))
        if file.read(4) != bytes(4):  # the length 0 of a next message; without it the reader takes any part for all
            raise broken(path, ".arrow", EOFError("it does not end as an Arrow stream does"))
    file.seek(0)
    open_it: Any = ipc.open_stream if is_stream else ipc.open_file
    fields = None if column is None else [_check_column(path, open_it(file).schema, column)]
    file.seek(0)
    reader = open_it(file, options=ipc.IpcReadOptions(included_fields=fields, use_threads=False))
    yield from reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))


def _check_column(path: str, schema: Any, column: str) -> int:
    """The number of the column.

    Raises:
        UserError: there is none of that name, or it holds no text.
    """
    from pyarrow import types

    if schema.names.count(column) != 1:
        names = ", ".join(f'"{name}"' for name in schema.names[:8]) or "none"
        several = "several columns" if column in schema.names else "no column"
        raise UserError(f'{path}: {several} "{column}" (columns: {names}); choose one with `text_key`')
    kind = schema.field(column).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)):
        raise UserError(f'{path}: the column "{column}" holds {kind}, not text; choose one with `text_key`')
    return schema.names.index(column)


def _plain(array: Any) -> Any:
    """An array of strings itself, or with the strings in place of numbers."""
    return array.dictionary_decode() if hasattr(array, "dictionary_decode") else array
