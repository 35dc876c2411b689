"""Compiled kernels of the indexed dataset: index checks, look-ups, flattening of encoded documents.

The arrays of an .idx file start at byte 34 and are therefore unaligned; they are read by memcpy, never through
typed pointers.
"""

cimport cython
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLong
from libc.stdint cimport int32_t, int64_t
from libc.string cimport memcpy

import numpy as np

ctypedef fused token_t:
    unsigned short
    int
    long long


cdef inline int64_t _int64_at(const unsigned char* data, Py_ssize_t index) noexcept nogil:
    cdef int64_t value
    memcpy(&value, data + 8 * index, 8)
    return value


cdef inline int32_t _int32_at(const unsigned char* data, Py_ssize_t index) noexcept nogil:
    cdef int32_t value
    memcpy(&value, data + 4 * index, 4)
    return value


cdef class SequenceTable:
    """Lengths and byte pointers of an index, over its memory map, with the tokens they point into.

    Args:
        index: the whole .idx file as bytes.
        tokens: the whole .bin file as one array, [tokens].
        count: number of sequences.
        sizes_at, pointers_at: byte offsets of the int32 lengths and the int64 pointers in `index`.
    """

    cdef const unsigned char[::1] _index
    cdef object _tokens
    cdef readonly Py_ssize_t count
    cdef Py_ssize_t _sizes_at, _pointers_at, _itemsize

    def __init__(self, const unsigned char[::1] index, tokens, Py_ssize_t count, Py_ssize_t sizes_at,
                 Py_ssize_t pointers_at):
        assert sizes_at >= 0 and sizes_at + 4 * count <= index.shape[0]
        assert pointers_at >= 0 and pointers_at + 8 * count <= index.shape[0]
        self._index = index
        self._tokens = tokens
        self.count = count
        self._sizes_at = sizes_at
        self._pointers_at = pointers_at
        self._itemsize = tokens.itemsize

    def find_fault(self):
        """Checks that the sequences lie back to back and fill the .bin file, as every writer leaves them.

        Returns:
            None, or (kind, sequence, found, expected) of the first fault; kind is one of "negative_length",
            "negative_pointer", "overlap", "gap", "beyond", "unused" (the last: bytes after all sequences).
        """
        cdef int64_t total = self._tokens.shape[0] * self._itemsize
        cdef int64_t expected = 0, pointer = 0, length = 0
        cdef Py_ssize_t i = 0
        cdef int fault = 0
        cdef const unsigned char* sizes
        cdef const unsigned char* pointers
        if self.count:
            sizes = &self._index[0] + self._sizes_at
            pointers = &self._index[0] + self._pointers_at
            with nogil:
                for i in range(self.count):
                    pointer = _int64_at(pointers, i)
                    length = _int32_at(sizes, i)
                    if length < 0:
                        fault = 1
                    elif pointer < 0:
                        fault = 2
                    elif pointer < expected:
                        fault = 3
                    elif pointer > total or length * self._itemsize > total - pointer:
                        fault = 4
                    elif pointer > expected:
                        fault = 5
                    if fault:
                        break
                    expected = pointer + length * self._itemsize
        if fault == 1:
            return "negative_length", i, length, 0
        if fault == 2:
            return "negative_pointer", i, pointer, expected
        if fault == 3:
            return "overlap", i, pointer, expected
        if fault == 4:
            return "beyond", i, pointer + length * self._itemsize, total
        if fault == 5:
            return "gap", i, pointer, expected
        if expected != total:
            return "unused", self.count, expected, total
        return None

    cpdef object get(self, Py_ssize_t index, Py_ssize_t offset=0, Py_ssize_t length=-1):
        """The tokens of one sequence, or `length` of them from `offset`; a view, not a copy.

        Raises:
            IndexError: no such sequence, or the part asked for is not within it.
        """
        cdef Py_ssize_t size, start
        if index < 0:
            index += self.count
        if index < 0 or index >= self.count:
            raise IndexError(f"sequence {index} of {self.count}")
        size = _int32_at(&self._index[self._sizes_at], index)
        if length < 0:
            length = size - offset
        if offset < 0 or length < 0 or offset > size - length:
            raise IndexError(f"tokens {offset} to {offset + length} of sequence {index}, which has {size}")
        start = _int64_at(&self._index[self._pointers_at], index) // self._itemsize + offset
        return self._tokens[start:start + length]


def find_document_fault(const unsigned char[::1] index, Py_ssize_t at, Py_ssize_t count, Py_ssize_t sequences):
    """Checks that the document index starts at 0, never falls and ends at the number of sequences.

    Args:
        index: the whole .idx file as bytes.
        at: byte offset of the int64 document index; count: its length; sequences: number of sequences.

    Returns:
        None, or (position, found, least or exact value expected) of the first fault.
    """
    cdef int64_t previous = 0, value = 0
    cdef Py_ssize_t i = 0
    cdef bint fault = False
    cdef const unsigned char* marks
    assert count >= 1 and at + 8 * count <= index.shape[0]
    marks = &index[at]
    if _int64_at(marks, 0) != 0:
        return 0, _int64_at(marks, 0), 0
    with nogil:
        for i in range(1, count):
            value = _int64_at(marks, i)
            if value < previous:
                fault = True
                break
            previous = value
    if fault:
        return i, value, previous
    if previous != sequences:
        return count - 1, previous, sequences
    return None


def flatten(list rows, dtype):
    """Concatenates lists of token ids.

    Args:
        rows: list of lists of int.
        dtype: integer dtype of the result.

    Returns:
        tokens [sum of lengths] of `dtype`, lengths [rows] int32.

    Raises:
        OverflowError: an id does not fit `dtype`; the message says which.
    """
    cdef Py_ssize_t i, total = 0
    lengths = np.empty(len(rows), dtype=np.int32)
    cdef int32_t[::1] sizes = lengths
    for i in range(PyList_GET_SIZE(rows)):
        sizes[i] = len(<list?> rows[i])
        total += sizes[i]
    tokens = np.empty(total, dtype=dtype)
    limits = np.iinfo(tokens.dtype)
    if tokens.dtype == np.uint16:
        _fill[cython.ushort](rows, tokens, limits.min, limits.max)
    elif tokens.dtype == np.int32:
        _fill[cython.int](rows, tokens, limits.min, limits.max)
    else:
        wide = np.empty(total, dtype=np.longlong)
        _fill[cython.longlong](rows, wide, limits.min, min(limits.max, np.iinfo(np.longlong).max))
        tokens[:] = wide
    return tokens, lengths


cdef _fill(list rows, token_t[::1] out, long long least, long long greatest):
    cdef Py_ssize_t i, j, at = 0
    cdef long long value
    cdef list row
    for i in range(PyList_GET_SIZE(rows)):
        row = <list> PyList_GET_ITEM(rows, i)
        for j in range(PyList_GET_SIZE(row)):
            value = PyLong_AsLongLong(<object> PyList_GET_ITEM(row, j))
            if value < least or value > greatest:
                raise OverflowError(f"token id {value} of document {i} is not in {least}..{greatest}")
            out[at] = <token_t> value
            at += 1
