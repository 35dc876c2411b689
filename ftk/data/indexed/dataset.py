"""Token sequences on disk: a reader of memory maps, and a writer whose output is complete or absent."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data.indexed._index import SequenceTable
from ftk.data.indexed.check import check_index, forget_pages
from ftk.data.indexed.file_map import FileMap, check_files
from ftk.data.indexed.format import SIZES_AT, dtype_code, file_size, pack_header, read_layout
from ftk.errors import UserError
from ftk.files import FileState, shortened, whole_file

_EAGER_CHECK_BYTES = 1 << 24  # a larger index is checked at the first access, so that opening stays instant
_COPY_NUMBERS = 1 << 20

FileStates = tuple[FileState, "FileState | None"]  # of the .idx and of the .bin, which may be empty


class IndexedDataset(SequenceTable):
    """Reads `PREFIX.bin` and `PREFIX.idx`, written by ftk, Megatron or fairseq (layout: `indexed.format`).

    The files are memory maps: opening costs nothing, tokens are views, processes share the pages. The whole index
    is checked before the first token is returned: when the dataset is opened or, for an
    index above 16 MiB, at the first access. Objects can be sent to worker processes; there the files are opened
    again, and checked again if they have changed since. Call `check_files` before using tokens: a file may have
    become shorter.

    `dataset[i]` and `get` are compiled (`_index.pyx`).

    Args:
        prefix: path of the pair without `.bin` and `.idx`.

    Attributes:
        prefix: as given.
        dialect: "megatron" (also ours) or "fairseq".
        dtype: dtype of the tokens.

    Raises:
        UserError: a file is missing, truncated, altered, or something else; the message says which and how.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, checked: FileStates | None = None) -> None:
        self.prefix = os.fspath(prefix)
        self.paths = paths_of(self.prefix)
        idx_path, bin_path = self.paths
        self.layout = read_layout(idx_path)
        self.dialect = self.layout.dialect
        self.dtype = self.layout.dtype
        num_bytes = file_size(bin_path)
        if num_bytes % self.dtype.itemsize:
            raise UserError(
                f"{bin_path}: {num_bytes} bytes do not divide into {self.dtype.name} tokens; "
                "it is truncated or altered, make it again"
            )
        self.index = FileMap(idx_path)
        self._tokens: npt.NDArray[Any] = np.empty(0, dtype=self.dtype)
        bin_state: FileState | None = None
        if num_bytes:
            data = FileMap(bin_path)
            bin_state = data.state
            if bin_state[2] < num_bytes:
                raise shortened(bin_path, bin_state[2], num_bytes)
            self._tokens = np.frombuffer(data, dtype=self.dtype, count=num_bytes // self.dtype.itemsize)
        self._states: FileStates = (self.index.state, bin_state)
        self._sizes: npt.NDArray[np.int32] | None = None
        layout = self.layout
        super().__init__(self.index, self._tokens, layout.num_sequences, layout.sizes_at, layout.pointers_at)
        if checked == self._states:
            self.accept()
        elif len(self.index) <= _EAGER_CHECK_BYTES:
            self.check()

    def check(self) -> None:
        """Reads the whole index, unless that has been done: one pass, in bounded memory.

        Raises:
            UserError: the index contradicts itself or the `.bin` file.
        """
        if not self.accepted:
            check_index(self)
            self.accept()

    def check_files(self) -> None:
        """Raises OSError if a file has become shorter since it was opened."""
        check_files(self.index, self._tokens)

    @property
    def sizes(self) -> npt.NDArray[np.int32]:
        """Length of each sequence in tokens, [sequences]; copied once, since in the file it is unaligned."""
        if self._sizes is None:
            self.check()
            view = np.frombuffer(self.index, "<i4", count=len(self), offset=self.layout.sizes_at)
            self._sizes = view.astype(np.int32)
            self._sizes.flags.writeable = False
            forget_pages(self.index, self.layout.sizes_at, self.layout.pointers_at)
        return self._sizes

    @property
    def document_index(self) -> npt.NDArray[np.int64]:
        """Document d is the sequences document_index[d] to document_index[d + 1], [documents + 1]."""
        self.check()
        if self.dialect == "fairseq":
            return np.arange(len(self) + 1, dtype=np.int64)
        marks = np.frombuffer(self.index, "<i8", count=self.layout.num_marks, offset=self.layout.marks_at)
        return marks.astype(np.int64)

    @property
    def num_documents(self) -> int:
        return len(self) if self.dialect == "fairseq" else self.layout.num_marks - 1

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return int(self._tokens.size)

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All sequences back to back, [num_tokens], a read-only view of the file."""
        self.check()
        return self._tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), self.prefix, checked=self._states if self.accepted else None), ()

    def __repr__(self) -> str:
        counts = f"{len(self)} sequences, {self.num_tokens} tokens"
        return f"IndexedDataset({self.prefix!r}: {counts}, {self.dtype.name})"


class IndexedDatasetWriter:
    """Writes `PREFIX.bin` and `PREFIX.idx`. Memory use does not depend on how much is written.

        with IndexedDatasetWriter("data-bin/train", np.uint16) as writer:
            writer.add([5, 6, 7])

    The pair gets its names when the block ends without an exception; otherwise nothing is left of it.

    Args:
        prefix: path of the pair without `.bin` and `.idx`; the folder must exist.
        dtype: token dtype: (u)int8, (u)int16, int32, int64, float32, float64; see `optimal_dtype`.
        overwrite: replace a pair that exists; without it, that is refused.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike, *, overwrite: bool = False) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        dtype_code(self.dtype)  # refuses a dtype that the format lacks
        self._idx_path, self._bin_path = paths_of(self.prefix)
        if not overwrite:
            for path in (self._idx_path, self._bin_path):
                if path.exists():
                    raise UserError(f"{path}: exists already; choose another name or ask to overwrite it")
        self._files = contextlib.ExitStack()

    def __enter__(self) -> IndexedDatasetWriter:
        with contextlib.ExitStack() as files:
            # Lengths go straight to their place in the index; pointers follow from them when all are known.
            self._idx_file = files.enter_context(whole_file(self._idx_path))  # put in place last
            self._bin_file = files.enter_context(whole_file(self._bin_path))
            self._marks_file = files.enter_context(tempfile.TemporaryFile(dir=self._idx_path.parent))
            self._files = files.pop_all()
        self._idx_file.write(bytes(SIZES_AT))
        self._num_sequences = self._num_marks = self._last_mark = 0
        self._write_marks(np.zeros(1, dtype=np.int64))
        return self

    def add(self, ids: Sequence[int] | npt.NDArray[Any], *, end_document: bool = True) -> None:
        """Writes one sequence.

        Args:
            ids: tokens, [length].
            end_document: the sequence is the last of its document; False if more of the document follows.

        Raises:
            UserError: a token does not fit the dtype.
        """
        array = np.asarray(ids)
        if array.ndim != 1:
            raise ValueError(f"a sequence has one dimension, not the shape {array.shape}")
        self._write(array, np.array([array.size], dtype=np.int64))
        if end_document:
            self.end_document()

    def add_documents(self, tokens: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        """Writes many documents of one sequence each.

        Args:
            tokens: all of them back to back, [sum of lengths].
            lengths: tokens in each, [documents].
        """
        if tokens.ndim != 1 or int(lengths.sum(dtype=np.int64)) != tokens.size:
            raise ValueError(f"lengths of {int(lengths.sum())} tokens for tokens of shape {tokens.shape}")
        first = self._num_sequences + 1
        self._write(tokens, lengths)
        self._write_marks(np.arange(first, first + lengths.size, dtype=np.int64))

    def end_document(self) -> None:
        """Ends the document that the sequences since the last end belong to."""
        self._write_marks(np.array([self._num_sequences], dtype=np.int64))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._finish()
            except BaseException:
                self._files.__exit__(*sys.exc_info())
                raise
            self._publish()
        else:
            self._files.__exit__(kind, error, trace)

    def _write(self, array: npt.NDArray[Any], lengths: npt.NDArray[Any]) -> None:
        if lengths.size and int(lengths.max()) > np.iinfo(np.int32).max:
            raise UserError(f"{self.prefix}: {int(lengths.max())} tokens in a sequence; the most is 2147483647")
        if array.size:
            self._bin_file.write(self._converted(array).data)
        self._idx_file.write(lengths.astype("<i4").data)
        self._num_sequences += lengths.size

    def _write_marks(self, marks: npt.NDArray[np.int64]) -> None:
        self._marks_file.write(marks.astype("<i8").data)
        self._num_marks += marks.size
        self._last_mark = self._num_sequences

    def _converted(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if array.dtype != self.dtype:
            if array.dtype.kind not in "uif":
                raise TypeError(f"tokens are numbers, not {array.dtype}")
            limits = np.iinfo(self.dtype) if self.dtype.kind in "ui" else None
            if limits and (array.dtype.kind == "f" or array.min() < limits.min or array.max() > limits.max):
                raise UserError(
                    f"{self.prefix}: sequence {self._num_sequences} holds {array.dtype.name} values from "
                    f"{array.min()} to {array.max()}, which do not all fit {self.dtype.name}; choose another"
                )
            array = array.astype(self.dtype)
        return np.ascontiguousarray(array)

    def _finish(self) -> None:
        if self._last_mark != self._num_sequences:
            self.end_document()
        idx, marks = self._idx_file, self._marks_file
        num_sequences, num_marks = self._num_sequences, self._num_marks
        pointer = 0
        for start in range(0, num_sequences, _COPY_NUMBERS):
            count = min(_COPY_NUMBERS, num_sequences - start)
            idx.seek(SIZES_AT + 4 * start)
            ends = pointer + np.cumsum(np.fromfile(idx, "<i4", count), dtype=np.int64) * self.dtype.itemsize
            idx.seek(SIZES_AT + 4 * num_sequences + 8 * start)
            idx.write(np.concatenate(([pointer], ends[:-1])).astype("<i8").data)
            pointer = int(ends[-1])
        idx.seek(SIZES_AT + 12 * num_sequences)
        marks.seek(0)
        for start in range(0, num_marks, _COPY_NUMBERS):
            idx.write(marks.read(8 * min(_COPY_NUMBERS, num_marks - start)))
        idx.seek(0)
        idx.write(pack_header(self.dtype, num_sequences, num_marks))

    def _publish(self) -> None:
        # A pair without its .idx does not exist: the old .idx is removed first, the new one put in place last.
        self._idx_path.unlink(missing_ok=True)
        try:
            self._files.close()
        except BaseException:
            self._bin_path.unlink(missing_ok=True)
            raise


def optimal_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest token dtype, as Megatron chooses it: uint16 below 65,500 words, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


def paths_of(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The .idx and the .bin file of a prefix."""
    return Path(f"{os.fspath(prefix)}.idx"), Path(f"{os.fspath(prefix)}.bin")
