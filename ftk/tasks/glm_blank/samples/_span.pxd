# Spans and their orders, for the other kernels. Up to 48 of anything are sorted faster by insertion than by qsort.

from libc.stdint cimport int64_t
from libc.stdlib cimport qsort


cdef struct Span:  # half-open; an array of them is an int64 [K, 2]
    int64_t start
    int64_t end


cdef inline int compare_lengths(const void* left, const void* right) noexcept nogil:
    """Shortest first; of equally long ones the first in the text."""
    cdef Span one = (<const Span*>left)[0], other = (<const Span*>right)[0]
    cdef int64_t difference = (one.end - one.start) - (other.end - other.start)
    if difference == 0:
        difference = one.start - other.start
    return (difference > 0) - (difference < 0)


cdef inline int compare_starts(const void* left, const void* right) noexcept nogil:
    cdef int64_t one = (<const Span*>left).start, other = (<const Span*>right).start
    return (one > other) - (one < other)


cdef inline int compare_values(const void* left, const void* right) noexcept nogil:
    cdef int64_t one = (<const int64_t*>left)[0], other = (<const int64_t*>right)[0]
    return (one > other) - (one < other)


cdef inline bint comes_after(const Span* one, const Span* other, bint by_length) noexcept nogil:
    if by_length and one.end - one.start != other.end - other.start:
        return one.end - one.start > other.end - other.start
    return one.start > other.start


cdef inline void sort_spans(Span* spans, Py_ssize_t count, bint by_length) noexcept nogil:
    """By length or else by start; not by a pointer to the comparison, which compilers do not look through."""
    cdef Py_ssize_t place, other
    cdef Span kept
    if count > 48:
        qsort(spans, count, sizeof(Span), compare_lengths if by_length else compare_starts)
        return
    for place in range(1, count):
        kept = spans[place]
        other = place
        while other > 0 and comes_after(&spans[other - 1], &kept, by_length):
            spans[other] = spans[other - 1]
            other -= 1
        spans[other] = kept


cdef inline void sort_values(int64_t* values, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t place, other
    cdef int64_t kept
    if count > 48:
        qsort(values, count, sizeof(int64_t), compare_values)
        return
    for place in range(1, count):
        kept = values[place]
        other = place
        while other > 0 and values[other - 1] > kept:
            values[other] = values[other - 1]
            other -= 1
        values[other] = kept
