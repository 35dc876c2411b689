# Laying out one sample, and hiding some of its inputs, for the kernel that makes samples (all without the GIL).

from libc.stdint cimport int64_t, uint8_t

from ftk.tasks.glm_blank.samples._span cimport Span
from ftk.data.random cimport RandomState


cdef struct Rows:  # where a sample is written
    int64_t* tokens
    int64_t* targets
    uint8_t* loss
    int64_t* places
    int64_t* blocks
    int64_t* documents  # or NULL


cdef struct Blanked:  # what it is made of; see `build_arrays`
    const int64_t* text
    Py_ssize_t size
    const int64_t* starts  # where each document begins in the text; needed for document numbers only
    Py_ssize_t num_documents
    const Span* spans
    const int64_t* order
    Py_ssize_t count
    const int64_t* mask_ids
    const int64_t* start_ids
    int64_t end_id
    bint block_positions
    bint append_end
    int64_t position_offset
    int64_t answer_position
    bint runs_on  # whether places count on behind the context


cdef Py_ssize_t lay_out(Blanked sample, Rows rows, int64_t* scratch) noexcept nogil
cdef void hide_answers(
    RandomState* state, int64_t* tokens, Py_ssize_t context_length, const Span* spans, const int64_t* order,
    Py_ssize_t count, int64_t hidden_id, double probability
) noexcept nogil
cdef void hide_context(
    RandomState* state, int64_t* tokens, Py_ssize_t context_length, const Span* spans, Py_ssize_t span_count,
    Py_ssize_t reach, Py_ssize_t wanted, int64_t cls_id, int64_t eos_id, int64_t hidden_id, int64_t* scratch
) noexcept nogil


cdef inline Py_ssize_t covered_tokens(const Span* spans, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t number, covered = 0
    for number in range(count):
        covered += spans[number].end - spans[number].start
    return covered
