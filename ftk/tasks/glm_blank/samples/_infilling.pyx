"""Kernels of blank infilling: laying out a sample's arrays, and hiding some of its inputs behind dBLOCK."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from ftk.tasks.glm_blank.samples._span cimport Span
from ftk.data.random cimport RandomState, next_below, next_uniform


cdef Py_ssize_t lay_out(Blanked sample, Rows rows, int64_t* scratch) noexcept nogil:
    """Writes one sample; returns the length of its context.

    Args:
        sample: what it is made of, taken as checked.
        rows: where it goes; each has room for the size of the text and two tokens a span.
        scratch: [3 * count].
    """
    cdef int64_t* blank_place = scratch  # where each blank stands in the context
    cdef int64_t* answer_of_span = blank_place + sample.count
    cdef int64_t* document_of_span = answer_of_span + sample.count
    cdef Py_ssize_t out = 0, kept_from = 0, start, length, inputs, step, answer, number, context_length
    cdef int64_t place
    for answer in range(sample.count):
        answer_of_span[sample.order[answer]] = answer

    for number in range(sample.count):
        start = sample.spans[number].start
        length = start - kept_from
        if length > 0:
            memcpy(rows.tokens + out, sample.text + kept_from, length * sizeof(int64_t))
            out += length
        blank_place[number] = out
        rows.tokens[out] = sample.mask_ids[answer_of_span[number]]
        out += 1
        kept_from = sample.spans[number].end
    length = sample.size - kept_from
    if length > 0:
        memcpy(rows.tokens + out, sample.text + kept_from, length * sizeof(int64_t))
        out += length
    context_length = out
    memcpy(rows.targets, rows.tokens, out * sizeof(int64_t))
    for step in range(out):
        rows.places[step] = step + sample.position_offset
        rows.blocks[step] = 0
        rows.loss[step] = 0
    if rows.documents != NULL:
        number_documents(sample, rows.documents, out, document_of_span)

    for answer in range(sample.count):
        number = sample.order[answer]
        start = sample.spans[number].start
        length = sample.spans[number].end - start
        inputs = length if sample.append_end else length - 1
        rows.tokens[out] = sample.start_ids[answer]
        if inputs > 0:
            memcpy(rows.tokens + out + 1, sample.text + start, inputs * sizeof(int64_t))
        memcpy(rows.targets + out, sample.text + start, length * sizeof(int64_t))
        if sample.append_end:
            rows.targets[out + length] = sample.end_id
        place = sample.answer_position
        if sample.runs_on:
            place = out + sample.position_offset
        elif place < 0:
            place = blank_place[number] + sample.position_offset
        for step in range(inputs + 1):
            rows.loss[out + step] = 1
            rows.places[out + step] = place + step * sample.runs_on
            rows.blocks[out + step] = step + 1 if sample.block_positions else 1
        if rows.documents != NULL:
            for step in range(inputs + 1):
                rows.documents[out + step] = document_of_span[number]
        out += inputs + 1
    return context_length


cdef void number_documents(
    Blanked sample, int64_t* documents, Py_ssize_t context_length, int64_t* document_of_span
) noexcept nogil:
    """The number, from 0, of the document of each context token and of each span; no span leaves its document."""
    cdef Py_ssize_t number = 0, span = 0, place = 0, out = 0
    while place < sample.size:
        while number + 1 < sample.num_documents and place >= sample.starts[number + 1]:
            number += 1
        documents[out] = number
        out += 1
        if span < sample.count and place == sample.spans[span].start:
            document_of_span[span] = number
            place = sample.spans[span].end
            span += 1
        else:
            place += 1


cdef void hide_answers(
    RandomState* state, int64_t* tokens, Py_ssize_t context_length, const Span* spans, const int64_t* order,
    Py_ssize_t count, int64_t hidden_id, double probability
) noexcept nogil:
    """Replaces each answer token among the inputs by hidden_id with the given probability; start tokens stay.

    The sample must have been laid out with an end token after each answer.
    """
    cdef Py_ssize_t out = context_length, answer, step, length
    for answer in range(count):
        length = spans[order[answer]].end - spans[order[answer]].start
        for step in range(1, length + 1):
            if next_uniform(state) < probability:
                tokens[out + step] = hidden_id
        out += length + 1


cdef void hide_context(
    RandomState* state, int64_t* tokens, Py_ssize_t context_length, const Span* spans, Py_ssize_t span_count,
    Py_ssize_t reach, Py_ssize_t wanted, int64_t cls_id, int64_t eos_id, int64_t hidden_id, int64_t* scratch
) noexcept nogil:
    """Replaces `wanted` context tokens at most `reach` tokens away from a blank by hidden_id.

    Blanks, [CLS] and end-of-document tokens stay. Where fewer tokens are near blanks, all of them are replaced.

    Args:
        scratch: [2 * context_length].
    """
    cdef int64_t* near = scratch
    cdef int64_t* candidates = scratch + context_length
    cdef Py_ssize_t number, blank, step, place, removed = 0, found = 0, other
    for place in range(context_length):
        near[place] = 0
    for number in range(span_count):
        blank = spans[number].start - removed
        for step in range(1, reach + 1):
            if blank >= step:
                near[blank - step] = 1
            if blank + step < context_length:
                near[blank + step] = 1
        removed += spans[number].end - spans[number].start - 1
    removed = 0
    for number in range(span_count):
        near[spans[number].start - removed] = 0
        removed += spans[number].end - spans[number].start - 1
    for place in range(context_length):
        if near[place] and tokens[place] != cls_id and tokens[place] != eos_id:
            candidates[found] = place
            found += 1
    for step in range(min(wanted, found)):
        other = step + next_below(state, found - step)
        tokens[candidates[other]] = hidden_id
        candidates[other] = candidates[step]


def build_arrays(
    const int64_t[::1] document,
    const int64_t[:, ::1] spans,
    const int64_t[::1] answer_order,
    const int64_t[::1] mask_ids,
    const int64_t[::1] start_ids,
    int64_t end_id,
    bint block_positions,
    bint append_end,
    int64_t position_offset,
    int64_t answer_position,
):
    """The arrays of one sample.

    Args:
        document: [N].
        spans: [K, 2] half-open, sorted, not overlapping, none empty.
        answer_order: [K], the number of the span that is answered first, second, ...
        mask_ids, start_ids: [K], command tokens of the first, second, ... answer.
        end_id: the end token.
        block_positions, append_end, position_offset: as of `build_sample`.
        answer_position: place of all answers, or -1 for the places of their blanks.

    Returns:
        tokens [T], targets [T], loss_mask [T], position_ids [2, T], context_length.
    """
    cdef Py_ssize_t count = spans.shape[0], context_length
    cdef const Span* places = span_pointer(spans)
    cdef Py_ssize_t total = document.shape[0] + count + (count if append_end else 0)
    check_spans(spans, answer_order, document.shape[0])
    if mask_ids.shape[0] < count or start_ids.shape[0] < count:
        raise ValueError(f"{count} spans need as many mask and start tokens")
    arrays = (
        np.empty(total, dtype=np.int64),
        np.empty(total, dtype=np.int64),
        np.empty(total, dtype=np.bool_),
        np.empty((2, total), dtype=np.int64),
    )
    cdef int64_t[::1] tokens = arrays[0], targets = arrays[1], scratch = np.empty(3 * count + 1, dtype=np.int64)
    cdef uint8_t[::1] loss = arrays[2].view(np.uint8)
    cdef int64_t[:, ::1] positions = arrays[3]
    cdef Blanked sample
    cdef Rows rows
    if total == 0:
        return *arrays, 0
    sample.text = &document[0]
    sample.size = document.shape[0]
    sample.starts, sample.num_documents = NULL, 0
    sample.spans, sample.count = places, count
    sample.order = number_pointer(answer_order)
    sample.mask_ids, sample.start_ids = number_pointer(mask_ids), number_pointer(start_ids)
    sample.end_id = end_id
    sample.block_positions, sample.append_end = block_positions, append_end
    sample.position_offset, sample.answer_position, sample.runs_on = position_offset, answer_position, False
    rows = Rows(&tokens[0], &targets[0], &loss[0], &positions[0, 0], &positions[1, 0], NULL)
    with nogil:
        context_length = lay_out(sample, rows, &scratch[0])
    return *arrays, context_length


cdef int check_spans(const int64_t[:, ::1] spans, const int64_t[::1] answer_order, int64_t size) except -1:
    """Raises ValueError unless spans are sorted, apart and within a text, and answered once each."""
    cdef Py_ssize_t number
    cdef int64_t end = 0
    seen = np.zeros(spans.shape[0], dtype=np.uint8)
    cdef uint8_t[::1] answered = seen
    if spans.shape[1] != 2 or answer_order.shape[0] != spans.shape[0]:
        raise ValueError("spans are pairs, each with its answer")
    for number in range(spans.shape[0]):
        if not end <= spans[number, 0] < spans[number, 1] <= size:
            raise ValueError(f"span {number} is empty, outside of the text, or in another")
        end = spans[number, 1]
        if not 0 <= answer_order[number] < spans.shape[0] or answered[answer_order[number]]:
            raise ValueError(f"answer {number} is of no span, or of one that has been answered")
        answered[answer_order[number]] = True
    return 0


cdef inline const int64_t* number_pointer(const int64_t[::1] values) noexcept nogil:
    return &values[0] if values.shape[0] else NULL


cdef inline const Span* span_pointer(const int64_t[:, ::1] spans) noexcept nogil:
    return <const Span*>&spans[0, 0] if spans.shape[0] else NULL
