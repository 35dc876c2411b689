"""Kernels of blank infilling: laying out a sample's arrays, and hiding some of its inputs behind dBLOCK."""

import numpy as np

cimport numpy as cnp
from libc.stdint cimport int64_t, uint8_t
from libc.string cimport memcpy

from ftk.data.random cimport RandomState, SampleRandom, next_below, next_uniform

cnp.import_array()


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
    """The arrays of one sample; the arguments are taken as checked.

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
    cdef Py_ssize_t count = spans.shape[0], covered = 0, number, answer
    for number in range(count):
        covered += spans[number, 1] - spans[number, 0]
    cdef cnp.npy_intp context_length = document.shape[0] - covered + count
    cdef cnp.npy_intp[2] shape
    shape[0] = 2
    shape[1] = context_length + covered + (count if append_end else 0)
    cdef Py_ssize_t total = shape[1]

    cdef cnp.ndarray tokens_array = cnp.PyArray_EMPTY(1, &shape[1], cnp.NPY_INT64, 0)
    cdef cnp.ndarray targets_array = cnp.PyArray_EMPTY(1, &shape[1], cnp.NPY_INT64, 0)
    cdef cnp.ndarray loss_array = cnp.PyArray_ZEROS(1, &shape[1], cnp.NPY_BOOL, 0)
    cdef cnp.ndarray position_array = cnp.PyArray_EMPTY(2, shape, cnp.NPY_INT64, 0)
    cdef int64_t* tokens = <int64_t*>cnp.PyArray_DATA(tokens_array)
    cdef int64_t* targets = <int64_t*>cnp.PyArray_DATA(targets_array)
    cdef uint8_t* loss = <uint8_t*>cnp.PyArray_DATA(loss_array)
    cdef int64_t* place_row = <int64_t*>cnp.PyArray_DATA(position_array)
    cdef int64_t* block_row = place_row + total

    # where each blank stands in the context, and which answer fills it: [2, K]
    cdef cnp.npy_intp[2] scratch_shape
    scratch_shape[0] = 2
    scratch_shape[1] = count
    cdef cnp.ndarray scratch = cnp.PyArray_EMPTY(2, scratch_shape, cnp.NPY_INT64, 0)
    cdef int64_t* blank_place = <int64_t*>cnp.PyArray_DATA(scratch)
    cdef int64_t* answer_of_span = blank_place + count

    cdef Py_ssize_t out = 0, kept_from = 0, start, length, inputs, step
    with nogil:
        for answer in range(count):
            answer_of_span[answer_order[answer]] = answer

        for number in range(count):
            start = spans[number, 0]
            length = start - kept_from
            if length > 0:
                memcpy(tokens + out, &document[kept_from], length * sizeof(int64_t))
                out += length
            blank_place[number] = out
            tokens[out] = mask_ids[answer_of_span[number]]
            out += 1
            kept_from = spans[number, 1]
        length = document.shape[0] - kept_from
        if length > 0:
            memcpy(tokens + out, &document[kept_from], length * sizeof(int64_t))
            out += length
        memcpy(targets, tokens, out * sizeof(int64_t))
        for step in range(out):
            place_row[step] = step + position_offset
            block_row[step] = 0

        for answer in range(count):
            number = answer_order[answer]
            start = spans[number, 0]
            length = spans[number, 1] - start
            inputs = length if append_end else length - 1
            tokens[out] = start_ids[answer]
            if inputs > 0:
                memcpy(tokens + out + 1, &document[start], inputs * sizeof(int64_t))
            memcpy(targets + out, &document[start], length * sizeof(int64_t))
            if append_end:
                targets[out + length] = end_id
            for step in range(inputs + 1):
                loss[out + step] = 1
                place_row[out + step] = (
                    blank_place[number] + position_offset if answer_position < 0 else answer_position
                )
                block_row[out + step] = step + 1 if block_positions else 1
            out += inputs + 1
    return tokens_array, targets_array, loss_array, position_array, context_length


def hide_answer_inputs(
    int64_t[::1] tokens,
    Py_ssize_t context_length,
    const int64_t[:, ::1] spans,
    const int64_t[::1] answer_order,
    int64_t hidden_id,
    double probability,
    SampleRandom rng,
):
    """Replaces each answer token among the inputs by hidden_id with the given probability, in place.

    Start tokens stay. The sample must have been built with an end token after each answer.
    """
    cdef Py_ssize_t out = context_length, answer, step, length
    with nogil:
        for answer in range(answer_order.shape[0]):
            length = spans[answer_order[answer], 1] - spans[answer_order[answer], 0]
            for step in range(1, length + 1):
                if next_uniform(&rng.state) < probability:
                    tokens[out + step] = hidden_id
            out += length + 1


def hide_context_inputs(
    int64_t[::1] tokens,
    Py_ssize_t context_length,
    const int64_t[:, ::1] spans,
    Py_ssize_t reach,
    Py_ssize_t count,
    int64_t cls_id,
    int64_t eos_id,
    int64_t hidden_id,
    SampleRandom rng,
):
    """Replaces `count` context tokens at most `reach` tokens away from a blank by hidden_id, in place.

    Blanks, [CLS] and end-of-document tokens stay. Where fewer tokens are near blanks, all of them are replaced.
    """
    cdef Py_ssize_t number, blank, step, place, removed = 0, found = 0, other
    cdef int64_t[::1] near = np.zeros(context_length, dtype=np.int64)
    cdef int64_t[::1] candidates = np.empty(context_length, dtype=np.int64)
    with nogil:
        for number in range(spans.shape[0]):
            blank = spans[number, 0] - removed
            for step in range(1, reach + 1):
                if blank >= step:
                    near[blank - step] = 1
                if blank + step < context_length:
                    near[blank + step] = 1
            removed += spans[number, 1] - spans[number, 0] - 1
        removed = 0
        for number in range(spans.shape[0]):
            near[spans[number, 0] - removed] = 0
            removed += spans[number, 1] - spans[number, 0] - 1
        for place in range(context_length):
            if near[place] and tokens[place] != cls_id and tokens[place] != eos_id:
                candidates[found] = place
                found += 1
        for step in range(min(count, found)):
            other = step + next_below(&rng.state, found - step)
            tokens[candidates[other]] = hidden_id
            candidates[other] = candidates[step]
