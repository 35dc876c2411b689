"""A look at many texts at once, before a library gets them."""

from cpython.unicode cimport PyUnicode_DATA, PyUnicode_KIND
from libc.stdint cimport uint16_t, uint32_t

ctypedef fused char_t:
    uint16_t
    uint32_t


def all_plain(texts):
    """Whether no text holds a surrogate (U+D800 to U+DFFF) and none is white space alone.
    """
    cdef str text
    cdef Py_ssize_t length
    for text in texts:
        length = len(text)
        if length == 0:
            continue
        if text[0].isspace() and text.isspace():
            return False
        if (<int> PyUnicode_KIND(text)) == 2 and _has_surrogate(<const uint16_t*> PyUnicode_DATA(text), length):
            return False
        if (<int> PyUnicode_KIND(text)) == 4 and _has_surrogate(<const uint32_t*> PyUnicode_DATA(text), length):
            return False
    return True


cdef bint _has_surrogate(const char_t* chars, Py_ssize_t length) noexcept nogil:
    cdef Py_ssize_t i
    cdef int found = 0
    for i in range(length):  # without a way out, so that it becomes vector instructions
        if chars[i] >> 11 == 0x1B:  # U+D800 to U+DFFF
            found = 1
    return found == 1
