# The rule for where a sentence ends, and the drawing of blanks, for the other kernels (all without the GIL).

from libc.stdint cimport int64_t, uint8_t

from ftk.data._span cimport Span
from ftk.data.random cimport RandomState


cdef struct SentenceEnds:  # marks[id] is not zero where the id's text ends a sentence
    const uint8_t* marks
    Py_ssize_t size


cdef inline SentenceEnds ends_of(const uint8_t[::1] marks) noexcept nogil:
    cdef SentenceEnds ends
    ends.marks = &marks[0] if marks.shape[0] > 0 else NULL
    ends.size = marks.shape[0]
    return ends


cdef struct Drawn:
    int objective  # 0 token, 1 sentence, 2 document
    bint append_end  # whether an end token follows each answer
    Py_ssize_t count  # number of spans


cdef inline bint marks_end(int64_t token, SentenceEnds ends) noexcept nogil:
    return 0 <= token < ends.size and ends.marks[token] != 0


cdef inline bint ends_sentence(
    const int64_t* tokens, Py_ssize_t place, Py_ssize_t stop, SentenceEnds ends
) noexcept nogil:
    """Whether the token at place ends a sentence and the next one does not go on ending it (as in "?!")."""
    if not marks_end(tokens[place], ends):
        return False
    return place + 1 >= stop or not marks_end(tokens[place + 1], ends)


cdef inline Py_ssize_t scratch_size(Py_ssize_t size) noexcept nogil:
    """Numbers of scratch space that drawing the blanks of a text of `size` tokens takes."""
    return 5 * (size + 1)


cdef class SpanDrawer:
    cdef tuple arguments
    cdef int64_t eos_id, cls_id
    cdef double single_span_prob, bert_prob, gap_sentence_prob, gpt_prob
    cdef double bert_ratio, gap_sentence_ratio, gpt_infill_prob, gpt_min_ratio
    cdef bint shuffle_blocks
    cdef object ends_array, weights_array  # keep what the pointers point to
    cdef SentenceEnds ends
    cdef const double* weights
    cdef Py_ssize_t num_weights

    cdef Drawn draw(
        self, RandomState* state, const int64_t* tokens, Py_ssize_t size, int64_t* scratch, Span* spans, int64_t* order
    ) noexcept nogil
    cdef int draw_objective(self, double drawn) noexcept nogil
