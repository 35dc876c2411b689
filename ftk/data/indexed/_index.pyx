"""Kernels of the indexed dataset: index checks, look-ups, gathering, flattening of encoded documents.

The arrays of an .idx file start at byte 34 and are therefore unaligned; they are read by memcpy, never through
typed pointers.
"""

cimport numpy as cnp
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLong
from cpython.object cimport PyTypeObject
from cpython.ref cimport Py_INCREF
from libc.stdint cimport INT32_MAX, int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t
from libc.string cimport memcpy

import errno

import numpy as np

cnp.import_array()

CHANGED = "Index changed while it was read (run again when nothing writes to it)"

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(PyTypeObject* subtype, cnp.dtype descr, int nd, const cnp.npy_intp* dims,
                                const cnp.npy_intp* strides, void* data, int flags, object obj)
    PyTypeObject PyArray_Type

ctypedef fused narrow_t:
    uint8_t
    int8_t
    int16_t
    uint16_t
    int32_t
    uint32_t

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
    cdef object _owner, _array
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
        self._array = tokens
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

    def gather(self, indices, *, pad=0, length=None, dtype=None, out=None):
        """Many sequences as the rows of one array; the copying is done without the GIL.

        Args:
            indices: which sequences, [N] integers; negative ones count from the end, repeats are fine.
            pad: fills each row behind its sequence.
            length: columns T; a longer sequence is cut behind its first T tokens. None: the longest's length.
            dtype: of the result: the file's (default), or int64, as models take it, from any integer type
                but uint64.
            out: array to write to, C-contiguous [N, T], of such a dtype; T and dtype follow from it.

        Returns:
            [N, T]; `out` if it was given.

        Raises:
            IndexError: there is no such sequence; nothing has been written then.
            ValueError: `out` or `dtype` does not fit, or `pad` does not fit the dtype.
        """
        starts, sizes, longest, _ = self._locate(indices)
        count = len(starts)
        if out is None:
            if length is not None and length < 0:
                raise ValueError(f"a length of {length} tokens")
            out = np.empty((count, longest if length is None else length), dtype=self._target_dtype(dtype))
        elif length is not None or dtype is not None:
            raise ValueError("out fixes length and dtype; leave them out")
        else:
            self._check_output(out, np.ndim(out) == 2 and len(out) == count, f"of shape [{count}, T]")
        width = out.shape[1]
        self._copy_rows(starts, np.minimum(sizes, width), np.arange(count) * width, out.reshape(-1), width,
                        _filler(pad, out.dtype))
        return out

    def gather_packed(self, indices, *, dtype=None, out=None):
        """Many sequences back to back; the copying is done without the GIL.

        Args:
            indices: which sequences, [N] integers, as for `gather`.
            dtype: of the tokens, as for `gather`.
            out: array to write to, contiguous [at least the sum of lengths], instead of a new one.

        Returns:
            tokens [sum of lengths], and offsets [N + 1] int64: row i is tokens[offsets[i] : offsets[i + 1]].

        Raises:
            IndexError: there is no such sequence; nothing has been written then.
            ValueError: `out` or `dtype` does not fit.
        """
        starts, sizes, _, total = self._locate(indices)
        if out is None:
            tokens = np.empty(total, dtype=self._target_dtype(dtype))
        elif dtype is not None:
            raise ValueError("out fixes the dtype; leave it out")
        else:
            self._check_output(out, np.ndim(out) == 1 and len(out) >= total, f"of one dimension that holds {total} tokens")
            tokens = out[:total]
        offsets = np.zeros(len(starts) + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        self._copy_rows(starts, sizes, offsets, tokens)
        return tokens, offsets

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

    cdef _locate(self, indices):
        """Byte offsets [N] and lengths [N] (both int64) of sequences, the greatest length, the sum of lengths."""
        cdef Py_ssize_t i, index, bad = -1, n
        cdef bint changed = False
        cdef int64_t longest = 0, total = 0
        if not self._accepted:
            self.check()
        given = np.asarray(indices)
        if given.ndim != 1 or (given.dtype.kind not in "iu" and given.size):
            raise ValueError(f"indices are a list of integers, not {given.dtype} of shape {given.shape}")
        cdef const int64_t[::1] wanted = np.ascontiguousarray(given, dtype=np.int64)
        n = wanted.shape[0]
        starts = np.empty(n, dtype=np.int64)
        sizes = np.empty(n, dtype=np.int64)
        cdef int64_t[::1] start_of = starts, size_of = sizes
        with nogil:
            for i in range(n):
                index = wanted[i]
                index = index + self._count if index < 0 else index
                if index < 0 or index >= self._count:
                    bad = i
                    break
                size_of[i] = _int32_at(self._sizes, index)
                start_of[i] = _int64_at(self._pointers, index)
                if not self._lies_within(start_of[i], size_of[i]):
                    changed = True
                    break
                total += size_of[i]
                longest = max(longest, size_of[i])
        if bad >= 0:
            raise IndexError(f"sequence {given[bad]} of {self._count}")
        if changed:
            raise self._changed()
        return starts, sizes, longest, total

    def _check_output(self, out, fits, expected):
        if not isinstance(out, np.ndarray) or not fits:
            raise ValueError(f"out must be an array {expected}")
        if not out.flags.c_contiguous or not out.flags.writeable:
            raise ValueError("out must be C-contiguous and writeable")
        self._target_dtype(out.dtype)

    def _target_dtype(self, dtype):
        own = self._descr
        wanted = own if dtype is None else np.dtype(dtype)
        if wanted == own or (wanted == np.int64 and own.kind in "iu" and own != np.uint64):
            return wanted
        raise ValueError(f"{own.name} tokens can be had as {own.name} or, except uint64 and floats, as int64; "
                         f"not as {wanted.name}")

    cdef _copy_rows(self, int64_t[::1] starts, int64_t[::1] sizes, int64_t[::1] places, out,
                    Py_ssize_t width=0, filler=0):
        """Copies rows, `sizes` tokens from the bytes `starts` of the file on, to `places` in a flat array.

        Rows are filled up to `width` tokens with `filler`.
        """
        cdef Py_ssize_t i, itemsize = self._itemsize
        cdef unsigned char[::1] target
        if itemsize != out.itemsize:
            _widen(self._array, starts, sizes, places, out, width, filler)
        elif out.size:
            if width > 0:
                out.fill(filler)
            target = out.view(np.uint8)
            with nogil:
                for i in range(starts.shape[0]):
                    memcpy(&target[0] + places[i] * itemsize, self._data + starts[i], sizes[i] * itemsize)


def _widen(const narrow_t[::1] tokens, int64_t[::1] starts, int64_t[::1] sizes, int64_t[::1] places, int64_t[::1] out,
           Py_ssize_t width, int64_t filler):
    """As `_copy_rows`, from narrow integers to int64."""
    cdef Py_ssize_t i
    cdef int64_t j
    cdef const narrow_t* source
    cdef int64_t* target
    if out.shape[0] == 0:
        return
    with nogil:
        for i in range(starts.shape[0]):
            source = &tokens[0] + starts[i] // <int64_t> sizeof(narrow_t)
            target = &out[0] + places[i]
            for j in range(sizes[i]):
                target[j] = source[j]
            for j in range(sizes[i], width):
                target[j] = filler


def _filler(pad, dtype):
    """`pad` as a number of `dtype`."""
    filler = np.empty(1, dtype=dtype)
    fits = True
    try:
        filler[:] = pad
    except OverflowError:
        fits = False
    if not fits or filler[0] != pad:
        raise ValueError(f"pad is {pad}, which {dtype.name} does not hold")
    return filler[0]


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
