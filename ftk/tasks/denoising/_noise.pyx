"""Kernel of denoising: permutes the sentences of the texts of a whole batch, hides spans, inserts masks, rotates."""

import numpy as np

from libc.math cimport ceil
from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

from ftk.data.random cimport (
    RandomState,
    next_below,
    next_uniform,
    search_cumulative,
    shuffle_indices,
    start_stream,
)

cdef enum:
    KEPT = 0
    MASKED = 1
    DELETED = 2

cdef struct Noise:
    double permuted
    double share
    double random_share
    double inserted
    double rotated
    Py_ssize_t replace_length
    int64_t mask
    const double* lengths
    Py_ssize_t num_lengths
    const int64_t* others
    Py_ssize_t num_others
    const uint8_t* kind
    const uint8_t* ends

cdef struct Scratch:
    int64_t* text
    int64_t* order
    int64_t* other_order
    uint8_t* marks


def corrupt(
    const int64_t[:, ::1] texts,
    const int64_t[::1] text_lengths,
    seed,
    epoch,
    indices,
    const uint8_t[::1] kind,
    const uint8_t[::1] ends,
    double permuted,
    double share,
    const double[::1] lengths,
    Py_ssize_t replace_length,
    double random_share,
    double inserted,
    double rotated,
    int64_t mask,
    const int64_t[::1] others,
    int64_t pad,
):
    """Texts with noise (Lewis et al. 2020, BART; as of fairseq's DenoisingDataset), each a pure function of (seed,
    epoch, index). The first and the last token of a text stay where they are.

    Args:
        texts: [B, T], tokens of the vocabulary; `text_lengths`: [B], at least 2 each.
        seed, epoch: of the random streams.
        indices: int64 [B], numbers of the samples.
        kind: [V], of a token: 2 belongs to the word of the token before it, others begin one.
        ends: [V], not zero for tokens that end a sentence.
        permuted: share of a text's sentences that change places.
        share: of its words that are hidden, rounded up; where spans overlap, fewer are.
        lengths: [K], how likely a span has at most 0, 1, ... words; a span of none is a mask that is inserted. Empty:
            each span is one word.
        replace_length: masks for a span: 1, 0, or -1 for one for each token.
        random_share: of the masks that become one of `others` instead.
        inserted: masks that are inserted besides, as a share of the tokens, rounded up.
        rotated: share of the texts that begin at a random place.
        mask: token.
        others: int64 [W], tokens.
        pad: fills.

    Returns:
        int64 [B, S], the texts with noise; their lengths int64 [B], of a text of n tokens at most n + ceil(inserted n):
        masks of spans without words for which there is no room are left out.
    """
    cdef const int64_t[::1] numbers = np.ascontiguousarray(indices, dtype=np.int64)
    cdef Py_ssize_t total = texts.shape[0], width = texts.shape[1], room, row, place
    size = np.asarray(text_lengths)
    if len(size) != total or len(numbers) != total or (size < 2).any() or (size > width).any():
        raise ValueError("lengths and indices do not fit the texts")
    if len(kind) != len(ends) or (total and np.max(texts) >= len(kind)) or (total and np.min(texts) < 0):
        raise ValueError("a token is outside the vocabulary")
    if random_share > 0.0 and not len(others):
        raise ValueError("no token may stand for a mask")
    room = width + <Py_ssize_t>ceil(inserted * width)
    noisy = np.full((total, room), pad, dtype=np.int64)
    noisy_lengths = np.zeros(total, dtype=np.int64)
    cdef int64_t[:, ::1] found = noisy
    cdef int64_t[::1] found_lengths = noisy_lengths
    cdef int64_t[:, ::1] numbers_scratch = np.empty((3, room + 1), dtype=np.int64)
    cdef uint8_t[::1] marks = np.empty(room + 1, dtype=np.uint8)
    cdef uint64_t seed_word = int(seed) & 0xFFFFFFFFFFFFFFFF, epoch_word = int(epoch) & 0xFFFFFFFFFFFFFFFF
    cdef RandomState state
    cdef Noise noise
    cdef Scratch scratch
    noise.permuted, noise.share, noise.random_share = permuted, share, random_share
    noise.inserted, noise.rotated, noise.replace_length, noise.mask = inserted, rotated, replace_length, mask
    noise.num_lengths, noise.num_others = lengths.shape[0], others.shape[0]
    noise.lengths = &lengths[0] if lengths.shape[0] else NULL
    noise.others = &others[0] if others.shape[0] else NULL
    noise.kind, noise.ends = &kind[0], &ends[0]
    scratch.text, scratch.order, scratch.other_order = (
        &numbers_scratch[0, 0], &numbers_scratch[1, 0], &numbers_scratch[2, 0],
    )
    scratch.marks = &marks[0]
    with nogil:
        for row in range(total):
            start_stream(&state, seed_word, epoch_word, <uint64_t>numbers[row])
            memcpy(&found[row, 0], &texts[row, 0], text_lengths[row] * sizeof(int64_t))
            found_lengths[row] = corrupt_row(&state, &noise, &scratch, &found[row, 0], text_lengths[row])
            for place in range(found_lengths[row], text_lengths[row]):
                found[row, place] = pad
    return noisy[:, : noisy_lengths.max(initial=0)].copy(), noisy_lengths


cdef Py_ssize_t corrupt_row(
    RandomState* state, const Noise* noise, Scratch* scratch, int64_t* text, Py_ssize_t length
) noexcept nogil:
    """One text, in place; returns its length."""
    cdef Py_ssize_t inserted = 0, room = length
    if noise.permuted > 0.0:
        permute(state, noise, scratch, text, length)
    if noise.share > 0.0:
        length = hide(state, noise, scratch, text, length, &inserted)
        length = insert(state, noise, scratch, text, length, min(inserted, room - length))
    if noise.inserted > 0.0:
        length = insert(state, noise, scratch, text, length, <Py_ssize_t>ceil(noise.inserted * length))
    if noise.rotated > 0.0 and next_uniform(state) < noise.rotated:
        rotate(scratch, text, length, next_below(state, max(1, length - 1)))
    return length


cdef void permute(
    RandomState* state, const Noise* noise, Scratch* scratch, int64_t* text, Py_ssize_t length
) noexcept nogil:
    """Puts a share of the sentences into each other's places. A sentence ends behind the last of the tokens that do."""
    cdef Py_ssize_t count = 0, place, number, some, at = 1, start, begin
    cdef int64_t* bounds = scratch.order  # where each sentence ends
    cdef int64_t* order
    memcpy(scratch.text, text, length * sizeof(int64_t))
    for place in range(1, length - 1):
        if place == length - 2 or (noise.ends[text[place]] and not noise.ends[text[place + 1]]):
            bounds[count] = place + 1
            count += 1
    if count < 2:
        return
    order = scratch.other_order
    for number in range(count):
        order[number] = number
    shuffle_indices(state, order, count)
    some = <Py_ssize_t>ceil(noise.permuted * count)
    # The first `some` of a random order change places with one another; the marks say which these are.
    memset(scratch.marks, 0, count)
    for number in range(some):
        scratch.marks[order[number]] = 1
    number = 0
    for place in range(count):
        if scratch.marks[place]:
            start = order[number]
            number += 1
        else:
            start = place
        begin = bounds[start - 1] if start > 0 else 1
        memcpy(text + at, scratch.text + begin, (bounds[start] - begin) * sizeof(int64_t))
        at += bounds[start] - begin


cdef Py_ssize_t hide(
    RandomState* state, const Noise* noise, Scratch* scratch, int64_t* text, Py_ssize_t length, Py_ssize_t* inserted
) noexcept nogil:
    """Puts masks for spans; returns the new length, and in `inserted` how many spans have no words."""
    cdef Py_ssize_t words = 0, budget, place, span, drawn, other, some, spans = 0, at = 0
    cdef int64_t* starts = scratch.order
    cdef int64_t* sizes = scratch.other_order
    cdef uint8_t* marks = scratch.marks
    inserted[0] = 0
    for place in range(1, length - 1):
        if place == 1 or noise.kind[text[place]] != 2:
            starts[words] = place
            words += 1
    budget = <Py_ssize_t>ceil(noise.share * words)
    drawn = 0
    while drawn < budget:
        some = 1 if noise.num_lengths == 0 else min(
            budget - drawn, search_cumulative(noise.lengths, noise.num_lengths, next_uniform(state))
        )
        if some == 0:
            inserted[0] += 1
        else:
            sizes[spans] = some
            spans += 1
            drawn += some
    memset(marks, KEPT, length)
    for span in range(spans):
        other = span + next_below(state, words - span)
        starts[span], starts[other] = starts[other], starts[span]
        place, some = starts[span], sizes[span]
        marks[place] = max(marks[place], DELETED if noise.replace_length == 0 else MASKED)
        while place + 2 < length:
            if noise.kind[text[place + 1]] != 2:
                some -= 1
                if some == 0:
                    break
            place += 1
            marks[place] = max(marks[place], MASKED if noise.replace_length == -1 else DELETED)
    for place in range(length):
        if marks[place] == KEPT:
            text[at] = text[place]
            at += 1
        elif marks[place] == MASKED:
            text[at] = mask_or_other(state, noise)
            at += 1
    return at


cdef Py_ssize_t insert(
    RandomState* state, const Noise* noise, Scratch* scratch, int64_t* text, Py_ssize_t length, Py_ssize_t count
) noexcept nogil:
    """Puts masks at random places between the first and the last token; returns the new length."""
    cdef Py_ssize_t places = length + count - 2, last, place, at = 1
    if count <= 0:
        return length
    memcpy(scratch.text, text, length * sizeof(int64_t))
    memset(scratch.marks, 0, places)
    for last in range(places - count, places):  # every choice equally likely (Bentley and Floyd 1987)
        place = next_below(state, last + 1)
        scratch.marks[last if scratch.marks[place] else place] = 1
    for place in range(places):
        if scratch.marks[place]:
            text[place + 1] = mask_or_other(state, noise)
        else:
            text[place + 1] = scratch.text[at]
            at += 1
    text[places + 1] = scratch.text[length - 1]
    return length + count


cdef void rotate(Scratch* scratch, int64_t* text, Py_ssize_t length, Py_ssize_t offset) noexcept nogil:
    """Puts the first `offset` tokens behind the others; the first and the last of all stay."""
    cdef Py_ssize_t inner = length - 2, place
    memcpy(scratch.text, text, length * sizeof(int64_t))
    for place in range(inner):
        text[1 + place] = scratch.text[1 + (place + offset) % inner]


cdef inline int64_t mask_or_other(RandomState* state, const Noise* noise) noexcept nogil:
    if noise.random_share > 0.0 and next_uniform(state) < noise.random_share:
        return noise.others[next_below(state, noise.num_others)]
    return noise.mask
