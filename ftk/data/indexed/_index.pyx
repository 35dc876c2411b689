"""Compiled kernels of the indexed dataset: index checks, look-ups, gathering, flattening of encoded documents.

The arrays of an .idx file start at byte 34 and are therefore unaligned; they are read by memcpy, never through
typed pointers.
"""

cimport cython
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

cdef extern from *:
    """
    #if defined(__GNUC__) || defined(__clang__)
    #define FTK_PREFETCH(address) __builtin_prefetch(address)
    #else
    #define FTK_PREFETCH(address) ((void)(address))
    #endif
    """
    void FTK_PREFETCH(const void* address) noexcept nogil

ctypedef fused token_t:
    unsigned short
    int
    long long

ctypedef fused narrow_t:
    uint8_t
    int8_t
    int16_t
    uint16_t
    int32_t
    uint32_t

cdef enum:  # memory is asked for before it is needed: random rows miss every cache
    AHEAD = 16  # rows ahead, at most
    BYTES_AHEAD = 4096  # in the rows ahead, about: fewer rows ahead when they are long
    MOST_LINES = 32  # cache lines of one row; behind them the processor has seen the direction
    FILLER_BYTES = 2048


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

    Nothing of the index is believed before a subclass has checked it: the first access calls `check`, which
    raises or calls `accept`.

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
        cdef cnp.npy_intp length
        if not self._accepted:
            self.check()
        if index < 0:
            index += self._count
        if index < 0 or index >= self._count:
            raise IndexError(f"sequence {index} of {self._count}")
        length = self._length_of(index)
        return self._view(_int64_at(self._pointers, index), length)

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
        if not self._accepted:
            self.check()
        if index < 0:
            index += self._count
        if index < 0 or index >= self._count:
            raise IndexError(f"sequence {index} of {self._count}")
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
        cdef Py_ssize_t width
        starts, sizes, longest, _ = self._locate(indices)
        if out is not None:
            if length is not None or dtype is not None:
                raise ValueError("out fixes length and dtype; leave them out")
            if not isinstance(out, np.ndarray) or out.ndim != 2 or out.shape[0] != starts.shape[0]:
                raise ValueError(f"out must be an array of shape [{starts.shape[0]}, T]")
            if not out.flags.c_contiguous or not out.flags.writeable:
                raise ValueError("out must be C-contiguous and writeable")
            self._target_dtype(out.dtype)
        else:
            if length is not None and length < 0:
                raise ValueError(f"a length of {length} tokens")
            width = longest if length is None else length
            out = np.empty((starts.shape[0], width), dtype=self._target_dtype(dtype))
        filler = _filler(pad, out.dtype, out.shape[1])
        if out.size:
            self._copy_rows(starts, sizes, None, out.reshape(-1).view(np.uint8), out.shape[1], out.itemsize,
                            filler.view(np.uint8))
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
        if out is not None:
            if dtype is not None:
                raise ValueError("out fixes the dtype; leave it out")
            if not isinstance(out, np.ndarray) or out.ndim != 1 or out.shape[0] < total:
                raise ValueError(f"out must be an array of one dimension that holds {total} tokens")
            if not out.flags.c_contiguous or not out.flags.writeable:
                raise ValueError("out must be C-contiguous and writeable")
            dtype = out.dtype
        offsets = np.zeros(starts.shape[0] + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        wanted = self._target_dtype(dtype)
        tokens = np.empty(total, dtype=wanted) if out is None else out[:total]
        if total:
            self._copy_rows(starts, sizes, offsets, tokens.view(np.uint8), 0, tokens.itemsize,
                            np.zeros(tokens.itemsize, dtype=np.uint8))
        return tokens, offsets

    def check(self):
        """Reads the whole index; a subclass raises what it finds wrong."""
        raise NotImplementedError

    def accept(self):
        """From now on the index is believed: it has been checked, by this object or by one it is a copy of."""
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
        if fault == 1:
            return ("negative_length", i, length, 0), 0
        if fault == 2:
            return ("negative_pointer", i, pointer, expected), 0
        if fault == 3:
            return ("overlap", i, pointer, expected), 0
        if fault == 4:
            return ("beyond", i, pointer + length * self._itemsize, total), 0
        if fault == 5:
            return ("gap", i, pointer, expected), 0
        return None, expected

    cdef inline bint _lies_within(self, int64_t at, int64_t length) noexcept nogil:
        """Whether the tokens lie within the file: an index is checked when it is opened, and may change later."""
        return 0 <= length <= INT32_MAX and 0 <= at <= self._num_bytes - length * self._itemsize

    cdef inline Py_ssize_t _length_of(self, Py_ssize_t index) except -1:
        cdef Py_ssize_t length = _int32_at(self._sizes, index)
        if not self._lies_within(_int64_at(self._pointers, index), length):
            raise OSError(errno.EIO, CHANGED, str(getattr(self, "prefix", "")))
        return length

    cdef inline object _view(self, int64_t at, cnp.npy_intp length):
        """`length` tokens from byte `at` on; the caller has made sure that they exist."""
        cdef object array
        Py_INCREF(self._descr)  # NewFromDescr takes a reference over
        array = PyArray_NewFromDescr(&PyArray_Type, self._descr, 1, &length, NULL, self._data + at, 0, None)
        cnp.set_array_base(array, self._owner)
        return array

    cdef _locate(self, indices):
        """Byte offsets [N] and lengths [N] (both int64) of sequences, the greatest length, the sum of lengths."""
        cdef Py_ssize_t i, index, bad = -1, changed = -1, n
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
                start_of[i] = index
            if bad < 0:
                for i in range(n):
                    if i + AHEAD < n:
                        FTK_PREFETCH(self._sizes + 4 * start_of[i + AHEAD])
                        FTK_PREFETCH(self._pointers + 8 * start_of[i + AHEAD])
                    index = start_of[i]
                    size_of[i] = _int32_at(self._sizes, index)
                    start_of[i] = _int64_at(self._pointers, index)
                    if not self._lies_within(start_of[i], size_of[i]):
                        changed = index
                        break
                    total += size_of[i]
                    if size_of[i] > longest:
                        longest = size_of[i]
        if bad >= 0:
            raise IndexError(f"sequence {given[bad]} of {self._count}")
        if changed >= 0:
            self._length_of(changed)
            raise OSError(errno.EIO, CHANGED, str(getattr(self, "prefix", "")))
        return starts, sizes, longest, total

    def _target_dtype(self, dtype):
        own = self._descr
        wanted = own if dtype is None else np.dtype(dtype)
        if wanted == own or (wanted == np.int64 and own.kind in "iu" and own != np.uint64):
            return wanted
        raise ValueError(f"{own.name} tokens can be had as {own.name} or, except uint64 and floats, as int64; "
                         f"not as {wanted.name}")

    cdef _copy_rows(self, int64_t[::1] starts, int64_t[::1] sizes, offsets, unsigned char[::1] out,
                    Py_ssize_t width, Py_ssize_t out_itemsize, unsigned char[::1] filler):
        """Copies rows to fixed places of `width` tokens, filled up, or, with `offsets`, back to back."""
        cdef const int64_t[::1] places
        cdef const int64_t* place = NULL
        if offsets is not None:
            places = offsets
            place = &places[0]
        cdef Py_ssize_t n = starts.shape[0]
        cdef int64_t filler_bytes = filler.shape[0]
        cdef char kind = ord(self._descr.kind)
        if self._itemsize == out_itemsize:
            with nogil:
                _copy(self._data, self._itemsize, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                      filler_bytes)
        elif kind == b"u" and self._itemsize == 1:
            with nogil:
                _widen[uint8_t](self._data, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                                filler_bytes, 0)
        elif kind == b"u" and self._itemsize == 2:
            with nogil:
                _widen[uint16_t](self._data, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                                 filler_bytes, 0)
        elif kind == b"u" and self._itemsize == 4:
            with nogil:
                _widen[uint32_t](self._data, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                                 filler_bytes, 0)
        elif self._itemsize == 1:
            with nogil:
                _widen[int8_t](self._data, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                               filler_bytes, 0)
        elif self._itemsize == 2:
            with nogil:
                _widen[int16_t](self._data, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                                filler_bytes, 0)
        else:
            with nogil:
                _widen[int32_t](self._data, &starts[0], &sizes[0], place, n, &out[0], width, &filler[0],
                                filler_bytes, 0)


cdef inline Py_ssize_t _rows_ahead(const int64_t* sizes, Py_ssize_t n, Py_ssize_t itemsize) noexcept nogil:
    """How many rows ahead memory is asked for: as many as have BYTES_AHEAD on average, 2 to AHEAD."""
    cdef Py_ssize_t i
    cdef int64_t total = 0
    for i in range(n):
        total += sizes[i]
    total = total * itemsize // n
    return max(2, min(AHEAD, BYTES_AHEAD // (total + 1)))


cdef inline void _ask_for(const char* data, int64_t num_bytes) noexcept nogil:
    """Asks for the first cache lines of a row."""
    cdef int64_t line
    for line in range(0, num_bytes if num_bytes < 64 * MOST_LINES else 64 * MOST_LINES, 64):
        FTK_PREFETCH(data + line)


cdef inline void _fill_up(unsigned char* out, int64_t num_bytes, const unsigned char* filler,
                          int64_t filler_bytes) noexcept nogil:
    """Writes the filler, many items long, again and again: memcpy writes as fast as the machine can."""
    while num_bytes > filler_bytes:
        memcpy(out, filler, filler_bytes)
        out += filler_bytes
        num_bytes -= filler_bytes
    memcpy(out, filler, num_bytes)


cdef void _copy(const char* data, Py_ssize_t itemsize, const int64_t* starts, const int64_t* sizes,
                const int64_t* places, Py_ssize_t n, unsigned char* out, Py_ssize_t width,
                const unsigned char* filler, int64_t filler_bytes) noexcept nogil:
    """Rows of the same item size: bytes are moved as they are."""
    cdef Py_ssize_t i, ahead = _rows_ahead(sizes, n, itemsize)
    cdef int64_t size, most = INT32_MAX if places != NULL else width
    for i in range(n):
        if i + ahead < n:
            _ask_for(data + starts[i + ahead], min(sizes[i + ahead], most) * itemsize)
        size = min(sizes[i], most)
        if places != NULL:
            memcpy(out + places[i] * itemsize, data + starts[i], size * itemsize)
        else:
            memcpy(out + i * width * itemsize, data + starts[i], size * itemsize)
            _fill_up(out + (i * width + size) * itemsize, (width - size) * itemsize, filler, filler_bytes)


cdef void _widen(const char* data, const int64_t* starts, const int64_t* sizes, const int64_t* places, Py_ssize_t n,
                 unsigned char* out, Py_ssize_t width, const unsigned char* filler, int64_t filler_bytes,
                 narrow_t _) noexcept nogil:
    """Rows of narrow integers to int64."""
    cdef Py_ssize_t i, ahead = _rows_ahead(sizes, n, sizeof(narrow_t))
    cdef int64_t j, size, most = INT32_MAX if places != NULL else width
    cdef const narrow_t* source
    cdef int64_t* target
    for i in range(n):
        if i + ahead < n:
            _ask_for(data + starts[i + ahead], min(sizes[i + ahead], most) * <int64_t> sizeof(narrow_t))
        size = min(sizes[i], most)
        source = <const narrow_t*> (data + starts[i])
        target = <int64_t*> out + (i * width if places == NULL else places[i])
        for j in range(size):
            target[j] = source[j]
        if places == NULL:  # after the row: memory is written in one direction
            _fill_up(<unsigned char*> (target + size), (width - size) * 8, filler, filler_bytes)


def _filler(pad, dtype, width):
    """Some items of `dtype` that hold `pad`: as many as a row has, if that is few."""
    filler = np.empty(max(1, min(width, FILLER_BYTES // dtype.itemsize)), dtype=dtype)
    try:
        filler[:] = pad
    except OverflowError:
        raise ValueError(f"pad is {pad}, which {dtype.name} does not hold") from None
    if filler[0] != pad:
        raise ValueError(f"pad is {pad}, which {dtype.name} does not hold")
    return filler


def find_document_fault(const unsigned char[::1] index, Py_ssize_t at, Py_ssize_t first, Py_ssize_t stop,
                        int64_t previous):
    """Checks that the entries first to stop - 1 of the document index never fall.

    Args:
        index: the whole .idx file as bytes.
        at: byte offset of the int64 document index.
        first, stop: which entries.
        previous: the entry before them.

    Returns:
        None and the last entry; or (position, found, least value expected) of the first fault and 0.
    """
    cdef int64_t value = previous
    cdef Py_ssize_t i = first
    cdef bint fault = False
    cdef const unsigned char* marks
    if not (0 <= first <= stop <= index.shape[0] // 8 and 0 <= at <= index.shape[0] - 8 * stop):
        raise IndexError(f"entries {first} to {stop}")
    if first == stop:
        return None, previous
    marks = &index[0] + at
    with nogil:
        for i in range(first, stop):
            value = _int64_at(marks, i)
            if value < previous:
                fault = True
                break
            previous = value
    if fault:
        return (i, value, previous), 0
    return None, previous


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
