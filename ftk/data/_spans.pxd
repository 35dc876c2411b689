# The rule for where a sentence ends, for the kernels that cut documents.

from libc.stdint cimport int64_t, uint8_t


cdef inline bint marks_end(int64_t token, const uint8_t[::1] sentence_ends) noexcept nogil:
    return 0 <= token < sentence_ends.shape[0] and sentence_ends[token] != 0


cdef inline bint ends_sentence(
    const int64_t[::1] tokens, Py_ssize_t place, Py_ssize_t stop, const uint8_t[::1] sentence_ends
) noexcept nogil:
    """Whether the token at place ends a sentence and the next one does not go on ending it (as in "?!")."""
    if not marks_end(tokens[place], sentence_ends):
        return False
    return place + 1 >= stop or not marks_end(tokens[place + 1], sentence_ends)
