"""Kernel of NoRepeatNgram: which tokens would repeat an n-gram."""

import numpy as np

from libc.stdint cimport int64_t


def repeating_tokens(const int64_t[:, ::1] rows, Py_ssize_t size):
    """The tokens that would make the end of a row an n-gram that stands in it already.

    Args:
        rows: [R, T] token ids.
        size: n, at least 1.

    Returns:
        two int64 arrays of one length: rows, and the token that each must not go on with; pairs may come twice.
    """
    cdef Py_ssize_t count = rows.shape[0], length = rows.shape[1], context = size - 1
    cdef Py_ssize_t row, start, i, found = 0, windows = length - context
    if windows <= 0 or count == 0:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    # Room for every window: at batch 32 x beam 4 x 512 tokens half a megabyte each.
    rows_array = np.empty(count * windows, dtype=np.int64)
    tokens_array = np.empty(count * windows, dtype=np.int64)
    cdef int64_t[::1] found_rows = rows_array
    cdef int64_t[::1] found_tokens = tokens_array
    cdef const int64_t* tokens
    with nogil:
        for row in range(count):
            tokens = &rows[row, 0]
            for start in range(windows):
                i = 0
                while i < context and tokens[start + i] == tokens[length - context + i]:
                    i += 1
                if i == context:
                    found_rows[found] = row
                    found_tokens[found] = tokens[start + context]
                    found += 1
    return rows_array[:found], tokens_array[:found]
