# The drawing of blanks, for the other kernels (all without the GIL).

from libc.stdint cimport int64_t

from ftk.data.corpora._sentence_ends cimport SentenceEnds
from ftk.tasks.glm_blank.samples._span cimport Span
from ftk.data.random cimport RandomState


cdef struct Drawn:
    int objective  # 0 token, 1 sentence, 2 document
    bint append_end  # whether an end token follows each answer
    Py_ssize_t count  # number of spans


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
