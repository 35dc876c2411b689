"""Kernels of document packing: drawing a document by its length, and finding sentence boundaries."""

from libc.stdint cimport int64_t, uint8_t

from ftk.data._spans cimport ends_sentence
from ftk.data.random cimport SampleRandom, next_uniform


def draw_document(const int64_t[::1] cumulative, SampleRandom rng):
    """The number of a document, drawn in proportion to its length.

    Args:
        cumulative: [D], running sums of the documents' lengths; the last is above zero.
        rng: its next uniform number u is used: the document is the one that holds token int(u * total).
    """
    cdef Py_ssize_t low = 0, high = cumulative.shape[0] - 1, middle
    cdef int64_t token
    with nogil:
        token = <int64_t>(next_uniform(&rng.state) * cumulative[high])
        while low < high:
            middle = (low + high) >> 1
            if cumulative[middle] > token:
                high = middle
            else:
                low = middle + 1
    return low


def sentence_start_before(const int64_t[::1] tokens, Py_ssize_t place, const uint8_t[::1] sentence_ends):
    """The nearest place <= `place` after which a sentence starts, or -1. Place 0 does not count by itself."""
    cdef Py_ssize_t start
    with nogil:
        for start in range(place, 0, -1):
            if ends_sentence(tokens, start - 1, tokens.shape[0], sentence_ends):
                break
        else:
            start = -1
    return start


def sentence_start_after(const int64_t[::1] tokens, Py_ssize_t place, const uint8_t[::1] sentence_ends):
    """The nearest place >= `place` where a sentence starts and at least one token follows, or -1."""
    cdef Py_ssize_t start
    with nogil:
        for start in range(max(place, 1), tokens.shape[0]):
            if ends_sentence(tokens, start - 1, tokens.shape[0], sentence_ends):
                break
        else:
            start = -1
    return start
