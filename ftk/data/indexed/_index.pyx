"""Kernels of the indexed dataset: index checks, look-ups, flattening of encoded documents.

The arrays of an .idx file start at byte 34 and are therefore unaligned; they are read by memcpy, never through
typed pointers.
"""

cimport numpy as cnp
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_ND, PyBuffer_Release, PyObject_GetBuffer
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLong
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport INT32_MAX, int32_t, int64_t
from libc.string cimport memcpy

import errno

import numpy as np

cnp.import_array()

CHANGED = "Index changed while it was read (run again when nothing writes to it)"

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyTypeObject* subtype, cnp.dtype descr, int nd, const cnp.npy_intp* dims,
                                const cnp.npy_intp* strides, void* data, int flags, object obj)
    PyTypeObject PyArray_Type

cdef tuple FAULTS = ("negative_length", "negative_pointer", "overlap", "beyond", "gap")


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

    Nothing of the index is used before a subclass has checked it: the first access calls `check`, which raises or
    calls `accept`.

    Args:
        index: the whole .idx file as bytes.
        tokens: the whole .bin file as one array, [tokens].
        count: number of sequences.
        sizes_at, pointers_at: byte offsets of the int32 lengths and the int64 pointers in `index`.
    """

    cdef const unsigned char[::1] _index
    cdef object _owner
    cdef cnp.dtype _descr
    cdef const unsigned char* _sizes
    cdef const unsigned char* _pointers
    cdef char* _data
    cdef Py_ssize_t _count, _itemsize
    cdef int64_t _num_bytes
    cdef bint _accepted

    def __init__(self, const unsigned char[::1] index, cnp.ndarray tokens not None, Py_ssize_t count,
                 Py_ssize_t sizes_at, Py_ssize_t pointers_at):
        if not (0 <= count <= index.shape[0] // 8 and 0 <= sizes_at <= index.shape[0] - 4 * count
                and 0 <= pointers_at <= index.shape[0] - 8 * count):
            raise ValueError(f"{count} sequences do not fit an index of {index.shape[0]} bytes")
        if tokens.ndim != 1 or not tokens.flags.c_contiguous:
            raise ValueError("the tokens are not one contiguous array")
        self._accepted = False
        self._index = index
        self._sizes = &index[0] + sizes_at if index.shape[0] else NULL
        self._pointers = &index[0] + pointers_at if index.shape[0] else NULL
        base = (<object> tokens).base
        self._owner = tokens if base is None else base
        self._descr = tokens.dtype
        self._data = <char*> cnp.PyArray_DATA(tokens)
        self._itemsize = tokens.itemsize
        self._num_bytes = tokens.nbytes
        self._count = count

    def __len__(self):
        return self._count

    def __getitem__(self, Py_ssize_t index):
        """The tokens of one sequence, [length], as a read-only view of the file."""
        index = self._number(index)
        return self._view(_int64_at(self._pointers, index), self._length_of(index))

    def get(self, Py_ssize_t index, Py_ssize_t offset=0, length=None):
        """A part of one sequence, without touching the rest of it.

        Args:
            index: the sequence.
            offset: first token of the part.
            length: tokens in the part; all that follow if None.

        Returns:
            [length], a read-only view of the file.

        Raises:
            IndexError: there is no such sequence, or the part is not within it.
        """
        cdef Py_ssize_t size, wanted
        index = self._number(index)
        size = self._length_of(index)
        wanted = size - offset if length is None else length
        if offset < 0 or wanted < 0 or offset > size - wanted:
            raise IndexError(f"tokens {offset} to {offset + wanted} of sequence {index}, which has {size}")
        return self._view(_int64_at(self._pointers, index) + offset * self._itemsize, wanted)

    def check(self):
        """Reads the whole index; a subclass raises what it finds wrong."""
        raise NotImplementedError

    def accept(self):
        """Says that the index has been checked, by this object or by one it is a copy of."""
        self._accepted = True

    @property
    def accepted(self):
        """Whether the index has been checked."""
        return bool(self._accepted)

    def find_fault(self, Py_ssize_t first, Py_ssize_t stop, int64_t expected):
        """Checks that the sequences first to stop - 1 lie back to back and within the .bin file.

        Args:
            first, stop: which sequences.
            expected: byte at which the first of them must begin.

        Returns:
            None and the byte at which they end; or (kind, sequence, found, expected) of the first fault and 0;
            kind is one of "negative_length", "negative_pointer", "overlap", "gap", "beyond".
        """
        cdef int64_t total = self._num_bytes, pointer = 0, length = 0
        cdef Py_ssize_t i = first
        cdef int fault = 0
        if not 0 <= first <= stop <= self._count:
            raise IndexError(f"sequences {first} to {stop} of {self._count}")
        with nogil:
            for i in range(first, stop):
                pointer = _int64_at(self._pointers, i)
                length = _int32_at(self._sizes, i)
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
        if not fault:
            return None, expected
        found = length if fault == 1 else pointer if fault != 4 else pointer + length * self._itemsize
        return (FAULTS[fault - 1], i, found, total if fault == 4 else expected), 0

    cdef inline Py_ssize_t _number(self, Py_ssize_t index) except -1:
        """The number of a sequence, which may be counted from the end; checks the index if nothing has yet."""
        if not self._accepted:
            self.check()
        if index < 0:
            index += self._count
        if index < 0 or index >= self._count:
            raise IndexError(f"sequence {index} of {self._count}")
        return index

    cdef inline bint _lies_within(self, int64_t at, int64_t length) noexcept nogil:
        """Whether the tokens lie within the file: an index is checked when it is opened, and may change later."""
        return 0 <= length <= INT32_MAX and 0 <= at <= self._num_bytes - length * self._itemsize

    cdef inline Py_ssize_t _length_of(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t length = _int32_at(self._sizes, index)
        if not self._lies_within(_int64_at(self._pointers, index), length):
            raise self._changed()
        return length

    cdef _changed(self):
        return OSError(errno.EIO, CHANGED, str(getattr(self, "prefix", "")))

    cdef inline object _view(self, int64_t at, cnp.npy_intp length):
        """`length` tokens from byte `at` on; the caller has made sure that they exist."""
        cdef object array
        Py_INCREF(self._descr)  # NewFromDescr takes a reference over
        array = PyArray_NewFromDescr(&PyArray_Type, self._descr, 1, &length, NULL, self._data + at, 0, None)
        cnp.set_array_base(array, self._owner)
        return array


def flatten(list rows, dtype):
    """Concatenates the token ids of documents.

    Args:
        rows: list of lists of int, or of arrays; contiguous buffers of int32 are fastest.
        dtype: integer dtype of the result.

    Returns:
        tokens [sum of lengths] of `dtype`, lengths [rows] int32.

    Raises:
        OverflowError: an id does not fit `dtype`; the message says which.
    """
    if rows and not isinstance(rows[0], list):
        try:
            return _flatten_buffers(rows, dtype)
        except (BufferError, TypeError, ValueError):  # of another type, or with gaps between the ids
            arrays = [np.asarray(ids) for ids in rows]
            if all(one.ndim == 1 for one in arrays) and (wide := np.concatenate(arrays)).dtype.kind in "iu":
                return _fitting(wide, np.array([len(one) for one in arrays], dtype=np.int32), dtype)
            rows = [one.tolist() for one in arrays]
    cdef Py_ssize_t i, j, at = 0, total = 0
    cdef list row
    lengths = np.empty(len(rows), dtype=np.int32)
    cdef int32_t[::1] sizes = lengths
    for i in range(PyList_GET_SIZE(rows)):
        sizes[i] = len(<list?> rows[i])
        total += sizes[i]
    limits = np.iinfo(dtype)
    cdef int64_t least = limits.min, greatest = min(limits.max, np.iinfo(np.int64).max), value
    tokens = np.empty(total, dtype=np.int64)
    cdef int64_t[::1] out = tokens
    for i in range(PyList_GET_SIZE(rows)):
        row = <list> PyList_GET_ITEM(rows, i)
        for j in range(PyList_GET_SIZE(row)):
            value = PyLong_AsLongLong(<object> PyList_GET_ITEM(row, j))
            if value < least or value > greatest:
                raise OverflowError(f"token id {value} of document {i} is not in {least}..{greatest}")
            out[at] = value
            at += 1
    return tokens.astype(dtype, copy=False), lengths


cdef tuple _flatten_buffers(list rows, dtype):
    """`flatten` of buffers. Each is requested once: a request takes longer than the copy."""
    cdef Py_ssize_t i, at = 0, size, room = 1 << 16
    cdef Py_buffer view
    lengths = np.empty(len(rows), dtype=np.int32)
    cdef int32_t[::1] sizes = lengths
    wide = np.empty(room, dtype=np.int32)
    cdef int32_t[::1] out = wide
    for i in range(PyList_GET_SIZE(rows)):
        PyObject_GetBuffer(<object> PyList_GET_ITEM(rows, i), &view, PyBUF_FORMAT | PyBUF_ND)
        try:
            if view.itemsize != 4 or view.ndim != 1 or view.format[0] != c"i":
                raise TypeError(f"the ids of document {i} are no int32")
            size = view.len // 4
            if at + size > room:
                room = 2 * (at + size)
                wide = np.concatenate([wide[:at], np.empty(room - at, dtype=np.int32)])
                out = wide
            if size:
                memcpy(&out[at], view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        sizes[i] = size
        at += size
    return _fitting(wide[:at], lengths, dtype)


cdef tuple _fitting(tokens, lengths, dtype):
    """The results of `flatten`."""
    limits = np.iinfo(dtype)
    wrong = np.flatnonzero((tokens < limits.min) | (tokens > limits.max)) if tokens.size else tokens
    if wrong.size:
        document = int(np.searchsorted(np.cumsum(lengths), wrong[0], side="right"))
        raise OverflowError(f"token id {tokens[wrong[0]]} of document {document} is not in {limits.min}..{limits.max}")
    return tokens.astype(dtype), lengths
