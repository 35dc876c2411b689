"""The full check of an index: one pass in slices, which releases the pages that it has read."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.data.indexed.dataset import IndexedDataset

SLICE = 1 << 20  # sequences


def check_index(dataset: IndexedDataset) -> None:
    """Checks that the sequences lie back to back and fill the .bin file, as every writer leaves them.

    And that the document index starts at 0, never falls and ends at the number of sequences. Memory is bounded: pages
    that have been read are released.

    Raises:
        UserError: the first fault.
    """
    layout, count = dataset.layout, len(dataset)
    end = 0
    for first in range(0, count, SLICE):
        stop = min(first + SLICE, count)
        fault, end = dataset.find_fault(first, stop, end)
        if fault is not None:
            raise UserError(_describe(dataset, *fault))
        forget_pages(dataset.index, layout.sizes_at + 4 * first, layout.sizes_at + 4 * stop)
        forget_pages(dataset.index, layout.pointers_at + 8 * first, layout.pointers_at + 8 * stop)
    if end != dataset.num_tokens * dataset.dtype.itemsize:
        raise UserError(_describe(dataset, "unused", count, end, 0))
    if dataset.dialect == "megatron":
        _check_document_index(dataset)


def forget_pages(mapped: mmap.mmap, start: int, stop: int) -> None:
    """Releases the pages of a file map in a range; they are read again when needed."""
    if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
        first = start - start % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, min(stop, len(mapped)) - first)


def _check_document_index(dataset: IndexedDataset) -> None:
    at, count = dataset.layout.marks_at, dataset.layout.num_marks
    for first in range(0, count, SLICE):
        begin, stop = max(first - 1, 0), min(first + SLICE, count)
        marks = np.frombuffer(dataset.index, "<i8", stop - begin, at + 8 * begin)
        falls = np.flatnonzero(marks[1:] < marks[:-1])
        fault = None
        if first == 0 and marks[0] != 0:
            fault = (0, marks[0], 0)
        elif len(falls):
            fault = (begin + falls[0] + 1, marks[falls[0] + 1], marks[falls[0]])
        elif stop == count and marks[-1] != len(dataset):
            fault = (count - 1, marks[-1], len(dataset))
        if fault is not None:
            position, found, expected = fault
            raise UserError(
                f"{dataset.paths[0]}: entry {position} of the document index is {found}, not {expected} "
                "(it starts at 0, never falls and ends at the number of sequences); make the file again"
            )
        forget_pages(dataset.index, at + 8 * first, at + 8 * stop)


def _describe(dataset: IndexedDataset, kind: str, sequence: int, found: int, expected: int) -> str:
    idx_path, bin_path = dataset.paths
    if kind in ("beyond", "unused"):
        what = f"sequence {sequence} ends" if kind == "beyond" else "all sequences end"
        num_bytes = dataset.num_tokens * dataset.dtype.itemsize
        return (
            f"{bin_path}: {num_bytes} bytes, but {what} at byte {found} according to "
            f"{idx_path.name}; one of them is truncated, altered or of another pair, make both again"
        )
    how = {
        "negative_length": f"has a length of {found} tokens",
        "negative_pointer": f"starts at byte {found}",
        "overlap": f"starts at byte {found}, inside the one before it, which ends at {expected}",
        "gap": f"starts at byte {found}, but the one before it ends at {expected}",
    }
    return f"{idx_path}: sequence {sequence} {how[kind]}; the file is altered, make it again"
