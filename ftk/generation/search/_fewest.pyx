"""Kernel of top-p and typical sampling: the fewest tokens that hold a share, found without sorting all."""

import numpy as np

from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport qsort
from libc.string cimport memcpy, memset

cdef enum:
    SHIFT = 17  # of the bits of a float32: 64 buckets for each power of two
    BUCKETS = 4096  # reach 64 powers below the greatest merit; the last one has the rest

cdef struct Item:
    double merit
    Py_ssize_t place


cdef int by_merit(const void* one, const void* other) noexcept nogil:
    cdef Item a = (<const Item*>one)[0]
    cdef Item b = (<const Item*>other)[0]
    if a.merit > b.merit:
        return -1
    if a.merit < b.merit:
        return 1
    return -1 if a.place < b.place else 1


cdef inline int32_t key_of(double merit) noexcept nogil:
    """A number that is ordered as merits are, up to those of one bucket."""
    cdef float value = <float>merit + <float>0.0  # a zero has one sign
    cdef int32_t bits
    memcpy(&bits, &value, 4)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


def fewest(const double[:, ::1] probabilities, const double[:, ::1] merits, double share):
    """The fewest of each row that hold `share`, those of the greatest merit first, of equal ones the first in the row.

    Args:
        probabilities: [R, X], at least 0.
        merits: [R, X], none NaN.
        share: above 0.

    Returns:
        float64 [R, X]: those probabilities, 0 elsewhere.
    """
    cdef Py_ssize_t num_rows = probabilities.shape[0], size = probabilities.shape[1]
    cdef Py_ssize_t row, i, count, bucket, last
    cdef int32_t top, limit
    cdef uint32_t width
    cdef double held
    cdef double sums[BUCKETS]
    found_array = np.empty((num_rows, size))
    keys_array = np.empty(size, dtype=np.int32)
    items_array = np.empty((size, sizeof(Item)), dtype=np.uint8)
    cdef double[:, ::1] found = found_array
    cdef int32_t[::1] keys_view = keys_array
    cdef unsigned char[:, ::1] items_view = items_array
    cdef const double* own
    cdef const double* merit
    cdef double* kept
    cdef int32_t* keys
    cdef Item* items
    if num_rows == 0 or size == 0:
        return found_array
    with nogil:
        keys = &keys_view[0]
        items = <Item*>&items_view[0, 0]
        for row in range(num_rows):
            own, merit, kept = &probabilities[row, 0], &merits[row, 0], &found[row, 0]
            top = key_of(merit[0])
            for i in range(size):
                keys[i] = key_of(merit[i])
                top = keys[i] if keys[i] > top else top
            memset(sums, 0, sizeof(sums))
            for i in range(size):
                bucket = <Py_ssize_t>top - keys[i]
                sums[bucket if bucket < BUCKETS else BUCKETS - 1] += own[i]
            held, last = 0.0, 0
            while last < BUCKETS - 1 and held + sums[last] < share:
                held += sums[last]
                last += 1
            limit = <int32_t>(top - last)  # the key of the bucket in which the share is reached
            width = 0 if last < BUCKETS - 1 else 0x7FFFFFFF  # the last bucket has all further keys
            # No branch but a rare one: a processor cannot foresee which are kept.
            for i in range(size):
                (<int64_t*>kept)[i] = (<const int64_t*>own)[i] & -<int64_t>(keys[i] > limit)
            count = 0
            for i in range(size):
                if <uint32_t>(limit - keys[i]) <= width:
                    items[count].merit, items[count].place = merit[i], i
                    count += 1
            qsort(items, count, sizeof(Item), by_merit)
            for i in range(count):
                if held >= share:
                    break
                kept[items[i].place] = own[items[i].place]
                held += own[items[i].place]
    return found_array
