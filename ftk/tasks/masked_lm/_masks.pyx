"""Kernel of masked language modeling: chooses the tokens of a whole batch that are hidden, and hides them."""

import numpy as np

from libc.math cimport floor, nearbyint
from libc.stdint cimport int64_t, uint8_t, uint64_t

from ftk.data.random cimport RandomState, next_below, next_uniform, shuffle_indices, start_stream


def hide(
    int64_t[:, ::1] tokens,
    const int64_t[::1] lengths,
    seed,
    epoch,
    indices,
    double share,
    Py_ssize_t most,
    bint rounded,
    const uint8_t[::1] kind,
    double unchanged,
    double replaced,
    int64_t mask,
    const int64_t[::1] others,
):
    """Masks tokens in place; rows are samples, and each is a pure function of (seed, epoch, index).

    Words are chosen in random order; a word with more tokens than are left to mask is skipped.

    Args:
        tokens: [B, T].
        lengths: [B], tokens of each row.
        seed, epoch: of the random streams.
        indices: int64 [B], numbers of the samples.
        share: p, of a row's n tokens that are hidden.
        most: tokens hidden in a row at most.
        rounded: hide max(1, round(p n)); else floor(p n + u), u uniform, which is p n in the mean.
        kind: [V], of a token: 0 never hidden, 1 begins a word, 2 belongs to the word of the token before it.
        unchanged, replaced: shares of the masked tokens that stay, or become one of `others`; the rest become `mask`.
        mask: token.
        others: [W], tokens.

    Returns:
        bool [B, T], which tokens were hidden.

    Raises:
        IndexError: a token outside the vocabulary.
    """
    cdef const int64_t[::1] numbers = np.ascontiguousarray(indices, dtype=np.int64)
    cdef Py_ssize_t total = tokens.shape[0], width = tokens.shape[1], row, outside = -1
    if lengths.shape[0] != total or numbers.shape[0] != total or (total and max(lengths) > width):
        raise ValueError("lengths and indices do not fit the tokens")
    hidden = np.zeros((total, width), dtype=np.uint8)
    cdef uint8_t[:, ::1] chosen = hidden
    cdef int64_t[::1] starts = np.empty(width + 1, dtype=np.int64)
    cdef int64_t[::1] order = np.empty(width + 1, dtype=np.int64)
    cdef uint64_t seed_word = int(seed) & 0xFFFFFFFFFFFFFFFF, epoch_word = int(epoch) & 0xFFFFFFFFFFFFFFFF
    cdef RandomState state
    if total == 0 or width == 0:
        return hidden.view(bool)
    with nogil:
        for row in range(total):
            start_stream(&state, seed_word, epoch_word, <uint64_t>numbers[row])
            outside = hide_row(
                &state, &tokens[row, 0], lengths[row], share, most, rounded, &kind[0], kind.shape[0],
                unchanged, replaced, mask, &others[0], others.shape[0], &chosen[row, 0], &starts[0], &order[0],
            )
            if outside >= 0:
                break
    if outside >= 0:
        raise IndexError(f"token {tokens[row, outside]} is outside the vocabulary of {kind.shape[0]}")
    return hidden.view(bool)


cdef Py_ssize_t hide_row(
    RandomState* state,
    int64_t* tokens,
    Py_ssize_t length,
    double share,
    Py_ssize_t most,
    bint rounded,
    const uint8_t* kind,
    Py_ssize_t vocab_size,
    double unchanged,
    double replaced,
    int64_t mask,
    const int64_t* others,
    Py_ssize_t num_others,
    uint8_t* chosen,
    int64_t* starts,
    int64_t* order,
) noexcept nogil:
    """One row; returns the place of a token outside the vocabulary, or -1. `starts`, `order`: scratch, [length + 1]."""
    cdef Py_ssize_t words = 0, place, word, left
    cdef double wanted = share * length, draw
    cdef uint8_t this, before = 0
    for place in range(length):
        if tokens[place] < 0 or tokens[place] >= vocab_size:
            return place
        this = kind[tokens[place]]
        if this == 1 or (this == 2 and before == 0):
            starts[words] = place
            words += 1
        before = this
    left = max(1, <Py_ssize_t>nearbyint(wanted)) if rounded else <Py_ssize_t>floor(wanted + next_uniform(state))
    left = min(left, most)
    for word in range(words):
        order[word] = word
    shuffle_indices(state, order, words)
    for word in range(words):
        if left == 0:
            break
        place = starts[order[word]] + 1
        while place < length and kind[tokens[place]] == 2:
            place += 1
        if place - starts[order[word]] > left:
            continue
        left -= place - starts[order[word]]
        for place in range(starts[order[word]], place):
            chosen[place] = 1
    for place in range(length):
        if chosen[place]:
            draw = next_uniform(state)
            if draw >= unchanged + replaced:
                tokens[place] = mask
            elif draw >= unchanged:
                tokens[place] = others[next_below(state, num_others)]
    return -1
