"""Kernels of the span samplers: where the text of a packed sequence is blanked out."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t

from ftk.data.random cimport (
    RandomState,
    SampleRandom,
    next_below,
    next_uniform,
    search_cumulative,
    shuffle_indices,
)


cdef Py_ssize_t find_segments(
    const int64_t[::1] tokens, int64_t eos_id, int64_t cls_id, int64_t[:, ::1] segments
) noexcept nogil:
    """Writes [start, end) of each run of text between [CLS] and end-of-document tokens; returns their number."""
    cdef Py_ssize_t place, count = 0, start = 0
    for place in range(tokens.shape[0] + 1):
        if place == tokens.shape[0] or tokens[place] == eos_id or tokens[place] == cls_id:
            if place > start:
                segments[count, 0] = start
                segments[count, 1] = place
                count += 1
            start = place + 1
    return count


cdef void sort_segments_by_length(int64_t[:, ::1] segments, Py_ssize_t count) noexcept nogil:
    """Shortest first; equally long ones stay in order."""
    cdef Py_ssize_t place, other
    cdef int64_t start, end
    for place in range(1, count):
        start = segments[place, 0]
        end = segments[place, 1]
        other = place
        while other > 0 and segments[other - 1, 1] - segments[other - 1, 0] > end - start:
            segments[other, 0] = segments[other - 1, 0]
            segments[other, 1] = segments[other - 1, 1]
            other -= 1
        segments[other, 0] = start
        segments[other, 1] = end


cdef Py_ssize_t draw_segment(RandomState* state, const int64_t[:, ::1] segments, Py_ssize_t count) noexcept nogil:
    """A segment, with probability in proportion to its length."""
    cdef Py_ssize_t number
    cdef int64_t total = 0, drawn
    for number in range(count):
        total += segments[number, 1] - segments[number, 0]
    drawn = next_below(state, total)
    for number in range(count):
        drawn -= segments[number, 1] - segments[number, 0]
        if drawn < 0:
            return number
    return count - 1


cdef void sort_small(int64_t* values, Py_ssize_t count) noexcept nogil:
    cdef Py_ssize_t place, other
    cdef int64_t kept
    for place in range(1, count):
        kept = values[place]
        other = place
        while other > 0 and values[other - 1] > kept:
            values[other] = values[other - 1]
            other -= 1
        values[other] = kept


cdef void place_spans(
    RandomState* state, int64_t start, int64_t length, const int64_t* span_lengths, Py_ssize_t count,
    int64_t* scratch, int64_t[:, ::1] spans, Py_ssize_t first
) noexcept nogil:
    """Puts `count` spans, in their order, at random into a segment, at least one token apart from each other."""
    cdef int64_t free = length
    cdef Py_ssize_t number
    for number in range(count):
        free -= span_lengths[number]
    free -= count - 1
    for number in range(count):
        scratch[number] = next_below(state, free + 1)
    sort_small(scratch, count)
    for number in range(count):
        spans[first + number, 0] = start + scratch[number]
        spans[first + number, 1] = start + scratch[number] + span_lengths[number]
        start += span_lengths[number] + 1


def token_spans(
    const int64_t[::1] tokens,
    int64_t eos_id,
    int64_t cls_id,
    double ratio,
    const double[::1] length_weights,
    bint single,
    SampleRandom rng,
):
    """Short random spans that cover about `ratio` of the tokens, none across documents, at least one token apart.

    Span lengths are drawn until they cover int(ratio * N) tokens (at least one); none is longer than fits into the
    longest document. They are dealt to the documents from the shortest to the longest, so that the documents so
    far have, to half a span, their part of all that is covered; the longest takes the rest. A length for which
    a document is too short goes to a later one. What fits nowhere is left out.

    Args:
        tokens: [N].
        ratio: share of the tokens to cover.
        length_weights: running sums of the weights of the lengths 1, 2, ...
        single: draw one span only, in a document drawn in proportion to its length.
        rng: the sample's random stream.

    Returns:
        int64 [K, 2] half-open spans, sorted; empty only where there is no text at all.
    """
    cdef Py_ssize_t size = tokens.shape[0]
    segments_array = np.empty((size + 1, 2), dtype=np.int64)
    lengths_array = np.empty((2, size + 1), dtype=np.int64)
    spans_array = np.empty((size + 1, 2), dtype=np.int64)
    cdef int64_t[:, ::1] segments = segments_array, spans = spans_array, lengths_and_scratch = lengths_array
    cdef int64_t* lengths = &lengths_and_scratch[0, 0]
    cdef int64_t* scratch = &lengths_and_scratch[1, 0]
    cdef RandomState* state = &rng.state
    cdef Py_ssize_t weights = length_weights.shape[0], segment_count, drawn = 0, used = 0, taken, number, found
    cdef int64_t wanted, drawn_total = 0, text_total = 0, longest = 0, length, seen = 0, covered = 0, covered_here
    with nogil:
        segment_count = find_segments(tokens, eos_id, cls_id, segments)
        for number in range(segment_count):
            length = segments[number, 1] - segments[number, 0]
            text_total += length
            longest = max(longest, length)
        wanted = 1 if single else max(1, <int64_t>(ratio * size))
        while segment_count > 0 and drawn_total < wanted:
            length = 1 + search_cumulative(
                &length_weights[0], weights, next_uniform(state) * length_weights[weights - 1]
            )
            lengths[drawn] = min(length, max(1, longest - 1))
            drawn_total += lengths[drawn]
            drawn += 1

        if segment_count > 0 and single:
            number = draw_segment(state, segments, segment_count)
            used = place_one(state, segments[number, 0], segments[number, 1], lengths, scratch, spans)
        elif segment_count > 0:
            # the draw that reached the mark is longer than the others on average: it must not always come last
            shuffle_indices(state, lengths, drawn)
            sort_segments_by_length(segments, segment_count)
            for number in range(segment_count):
                length = segments[number, 1] - segments[number, 0]
                seen += length
                taken = 0
                covered_here = 0
                while True:
                    found = first_that_fits(lengths, used + taken, drawn, length - covered_here - taken)
                    if found == drawn:
                        break
                    if (
                        number < segment_count - 1
                        and (2 * (covered + covered_here) + lengths[found]) * text_total > 2 * drawn_total * seen
                    ):
                        break
                    swap(lengths, found, used + taken)
                    covered_here += lengths[used + taken]
                    taken += 1
                if taken > 0:
                    place_spans(state, segments[number, 0], length, lengths + used, taken, scratch, spans, used)
                    used += taken
                    covered += covered_here
    result = spans_array[:used]
    if segment_count > 1 and used > 1:
        result = result[np.argsort(result[:, 0])]
    return np.ascontiguousarray(result)


cdef Py_ssize_t first_that_fits(
    const int64_t* lengths, Py_ssize_t first, Py_ssize_t stop, int64_t room
) noexcept nogil:
    """The first of the lengths first .. stop - 1 that is at most room; stop if there is none."""
    while first < stop and lengths[first] > room:
        first += 1
    return first


cdef void swap(int64_t* values, Py_ssize_t left, Py_ssize_t right) noexcept nogil:
    cdef int64_t kept = values[left]
    values[left] = values[right]
    values[right] = kept


cdef Py_ssize_t place_one(
    RandomState* state, int64_t start, int64_t end, int64_t* lengths, int64_t* scratch, int64_t[:, ::1] spans
) noexcept nogil:
    """One span of the first length, cut so that a token of the segment stays where it has two or more."""
    lengths[0] = min(lengths[0], max(1, end - start - 1))
    place_spans(state, start, end - start, lengths, 1, scratch, spans, 0)
    return 1


def sentence_spans(
    const int64_t[::1] tokens,
    int64_t eos_id,
    int64_t cls_id,
    double ratio,
    const uint8_t[::1] sentence_ends,
    SampleRandom rng,
):
    """Whole sentences in random order until they cover int(ratio * N) tokens (at least one sentence).

    Args:
        tokens: [N].
        ratio: share of the tokens to cover, at least.
        sentence_ends: [V], not zero for ids whose text ends a sentence. What follows the last of them in a
            document is a sentence, too.
        rng: the sample's random stream.

    Returns:
        int64 [K, 2] half-open spans, sorted; they may touch. Empty only where there is no text at all.
    """
    cdef Py_ssize_t size = tokens.shape[0]
    cdef int64_t[:, ::1] segments = np.empty((size + 1, 2), dtype=np.int64)
    cdef int64_t[:, ::1] sentences = np.empty((size + 1, 2), dtype=np.int64)
    spans_array = np.empty((size + 1, 2), dtype=np.int64)
    cdef int64_t[:, ::1] spans = spans_array
    cdef int64_t[::1] order = np.empty(size + 1, dtype=np.int64)
    cdef Py_ssize_t segment_count, count = 0, number, place, used = 0
    cdef int64_t start, end, covered = 0, wanted
    with nogil:
        segment_count = find_segments(tokens, eos_id, cls_id, segments)
        for number in range(segment_count):
            start = segments[number, 0]
            end = segments[number, 1]
            for place in range(start, end):
                if place == end - 1 or ends_sentence(tokens, place, end, sentence_ends):
                    sentences[count, 0] = start
                    sentences[count, 1] = place + 1
                    start = place + 1
                    order[count] = count
                    count += 1
        shuffle_indices(&rng.state, &order[0], count)
        wanted = max(1, <int64_t>(ratio * size))
        while used < count and covered < wanted:
            number = order[used]
            covered += sentences[number, 1] - sentences[number, 0]
            used += 1
        sort_small(&order[0], used)
        for number in range(used):
            spans[number, 0] = sentences[order[number], 0]
            spans[number, 1] = sentences[order[number], 1]
    return np.ascontiguousarray(spans_array[:used])


def document_span(
    const int64_t[::1] tokens, int64_t eos_id, int64_t cls_id, double suffix_prob, double min_ratio, SampleRandom rng
):
    """One long span: the end of a document, or a stretch inside it.

    The document is drawn in proportion to its length n, the span's length uniformly between min_ratio * n and
    n - 1 tokens. Where several documents are packed it is always a document's end, which takes the
    end-of-document token with it, if there is one.

    Args:
        tokens: [N].
        suffix_prob: probability of the end of the document where there is one document only.
        min_ratio: least share of the document.
        rng: the sample's random stream.

    Returns:
        int64 [1, 2] (or [0, 2] where there is no text), and whether it is the end of a document.
    """
    cdef int64_t[:, ::1] segments = np.empty((tokens.shape[0] + 1, 2), dtype=np.int64)
    cdef RandomState* state = &rng.state
    cdef Py_ssize_t count = find_segments(tokens, eos_id, cls_id, segments), number
    if count == 0:
        return np.empty((0, 2), dtype=np.int64), False
    cdef int64_t start, end, shortest, longest, length
    cdef bint suffix
    with nogil:
        number = draw_segment(state, segments, count)
        start = segments[number, 0]
        end = segments[number, 1]
        longest = max(1, end - start - 1)
        shortest = min(longest, max(1, <int64_t>(min_ratio * (end - start))))
        length = shortest + next_below(state, longest - shortest + 1)
        suffix = count > 1 or next_uniform(state) < suffix_prob
        if suffix:
            start = end - length
            if end < tokens.shape[0] and tokens[end] == eos_id:
                end += 1
        else:
            start += next_below(state, end - start - length + 1)
            end = start + length
    return np.array([[start, end]], dtype=np.int64), bool(suffix)
