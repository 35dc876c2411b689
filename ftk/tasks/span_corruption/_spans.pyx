"""Kernel of span corruption: cuts the texts of a whole batch into runs that are kept and runs that are hidden."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport memcpy, memset

from ftk.data.random cimport RandomState, next_below, start_stream


def corrupt(
    const int64_t[:, ::1] texts,
    const int64_t[::1] lengths,
    const int64_t[::1] hidden,
    const int64_t[::1] spans,
    seed,
    epoch,
    indices,
    const int64_t[::1] sentinels,
    int64_t end,
    int64_t pad,
):
    """Kept and hidden runs of each text in turn, the first one kept; a text is a pure function of (seed, epoch, index).

    Args:
        texts: [B, L].
        lengths: [B], tokens of each text.
        hidden: [B], how many of them are hidden, below the length.
        spans: [B], in how many runs; as many are kept. 0 only where nothing is hidden.
        seed, epoch: of the random streams.
        indices: int64 [B], numbers of the samples.
        sentinels: [K], the tokens that stand for the first run, the second, ...
        end: token at the end of both.
        pad: fills.

    Returns:
        The kept runs, a sentinel behind each, int64 [B, S]; the hidden ones, a sentinel in front of each, int64 [B, T].
    """
    cdef const int64_t[::1] numbers = np.ascontiguousarray(indices, dtype=np.int64)
    cdef Py_ssize_t total = texts.shape[0], row
    length, some, runs = np.asarray(lengths), np.asarray(hidden), np.asarray(spans)
    if not len(length) == len(some) == len(runs) == len(numbers) == total:
        raise ValueError("lengths, counts and indices do not fit the texts")
    if (length < 0).any() or (length > texts.shape[1]).any():
        raise ValueError("a text is longer than its row")
    most = np.minimum(np.minimum(some, length - some), len(sentinels))
    if (some < 0).any() or (runs < np.minimum(some, 1)).any() or (runs > most).any():
        raise ValueError("a text has too few tokens for its number of runs")
    kept = np.full((total, (length - some + runs).max(initial=0) + 1), pad, dtype=np.int64)
    asked = np.full((total, (some + runs).max(initial=0) + 1), pad, dtype=np.int64)
    cdef int64_t[:, ::1] source = kept, target = asked
    cdef uint8_t[::1] cuts = np.empty(2 * texts.shape[1] + 2, dtype=np.uint8)
    cdef uint64_t seed_word = int(seed) & 0xFFFFFFFFFFFFFFFF, epoch_word = int(epoch) & 0xFFFFFFFFFFFFFFFF
    cdef RandomState state
    with nogil:
        for row in range(total):
            start_stream(&state, seed_word, epoch_word, <uint64_t>numbers[row])
            corrupt_row(
                &state, &texts[row, 0] if texts.shape[1] else NULL, lengths[row], hidden[row], spans[row],
                &sentinels[0] if sentinels.shape[0] else NULL, end, &source[row, 0], &target[row, 0],
                &cuts[0], &cuts[0] + texts.shape[1] + 1,
            )
    return kept, asked


cdef void corrupt_row(
    RandomState* state,
    const int64_t* text,
    Py_ssize_t length,
    Py_ssize_t hidden,
    Py_ssize_t spans,
    const int64_t* sentinels,
    int64_t end,
    int64_t* source,
    int64_t* target,
    uint8_t* hidden_cuts,
    uint8_t* kept_cuts,
) noexcept nogil:
    """One text. `hidden_cuts`, `kept_cuts`: scratch, [length]."""
    cdef Py_ssize_t span, some, kept = length - hidden, read_kept = 0, read_hidden = 0
    if spans > 0:
        choose(state, hidden_cuts, hidden - 1, spans - 1)
        choose(state, kept_cuts, kept - 1, spans - 1)
    for span in range(spans):
        some = run_length(kept_cuts, read_kept, kept)
        memcpy(source, text, some * sizeof(int64_t))
        source += some
        text += some
        read_kept += some
        source[0] = target[0] = sentinels[span]
        source += 1
        target += 1
        some = run_length(hidden_cuts, read_hidden, hidden)
        memcpy(target, text, some * sizeof(int64_t))
        target += some
        text += some
        read_hidden += some
    if spans == 0:
        memcpy(source, text, length * sizeof(int64_t))
        source += length
    source[0] = target[0] = end


cdef inline Py_ssize_t run_length(const uint8_t* cuts, Py_ssize_t start, Py_ssize_t total) noexcept nogil:
    """Tokens up to the next cut, or to the end."""
    cdef Py_ssize_t place = start
    while place < total - 1 and not cuts[place]:
        place += 1
    return place + 1 - start


cdef inline void choose(RandomState* state, uint8_t* chosen, Py_ssize_t count, Py_ssize_t wanted) noexcept nogil:
    """Marks `wanted` of `count` places, every choice equally likely (Bentley and Floyd 1987): one draw for each."""
    cdef Py_ssize_t last, place
    memset(chosen, 0, count)
    for last in range(count - wanted, count):
        place = next_below(state, last + 1)
        chosen[last if chosen[place] else place] = 1
