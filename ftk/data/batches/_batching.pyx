"""Kernel of batching: cuts a sequence of sizes into batches."""

import numpy as np

from libc.stdint cimport int32_t, int64_t


def batch_bounds(const int32_t[::1] sizes, int64_t batch_size, int64_t max_tokens, int64_t multiple):
    """Bounds of the batches, greedily from the first sample on.

    Args:
        sizes: [N], tokens of each sample, in the order in which they are batched.
        batch_size, max_tokens: limits, 0 for none; no sample may exceed max_tokens alone.
        multiple: a batch that has at least so many samples gets a multiple of it.

    Returns:
        int64 [batches + 1]: batch b is the samples bounds[b] .. bounds[b + 1] - 1.
    """
    cdef Py_ssize_t total = sizes.shape[0], start = 0, stop, count = 1
    bounds_array = np.empty(total + 1, dtype=np.int64)
    cdef int64_t[::1] bounds = bounds_array
    cdef int64_t longest, length
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; it must be at least 1")
    bounds[0] = 0
    with nogil:
        while start < total:
            longest = 0
            stop = start
            while stop < total:
                if batch_size > 0 and stop - start == batch_size:
                    break
                length = max(longest, sizes[stop])
                if max_tokens > 0 and length * (stop - start + 1) > max_tokens and stop > start:
                    break
                longest = length
                stop += 1
            if stop - start > multiple:
                stop -= (stop - start) % multiple
            bounds[count] = stop
            count += 1
            start = stop
    return bounds_array[:count].copy()
