# The rule for where a sentence ends, for kernels (without the GIL).

from libc.stdint cimport int64_t, uint8_t


cdef struct SentenceEnds:  # marks[id] is not zero where the id's text ends a sentence
    const uint8_t* marks
    Py_ssize_t size


cdef inline SentenceEnds ends_of(const uint8_t[::1] marks) noexcept nogil:
    cdef SentenceEnds ends
    ends.marks = &marks[0] if marks.shape[0] > 0 else NULL
    ends.size = marks.shape[0]
    return ends


cdef inline bint marks_end(int64_t token, SentenceEnds ends) noexcept nogil:
    return 0 <= token < ends.size and ends.marks[token] != 0


cdef inline bint ends_sentence(
    const int64_t* tokens, Py_ssize_t place, Py_ssize_t stop, SentenceEnds ends
) noexcept nogil:
    """Whether the token at place ends a sentence and the next one does not go on ending it (as in "?!")."""
    if not marks_end(tokens[place], ends):
        return False
    return place + 1 >= stop or not marks_end(tokens[place + 1], ends)
