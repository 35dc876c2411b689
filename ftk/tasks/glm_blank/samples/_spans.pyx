"""Kernels of the span samplers: where the text of a packed sequence is blanked out."""

import numpy as np

from libc.stdint cimport int64_t, uint8_t

from ftk.tasks.glm_blank.samples._span cimport Span, sort_spans, sort_values
from ftk.data.corpora._sentence_ends cimport SentenceEnds, ends_of, ends_sentence
from ftk.data.random cimport (
    RandomState,
    SampleRandom,
    next_below,
    next_uniform,
    search_cumulative,
    shuffle_indices,
)

cdef int TOKEN = 0, SENTENCE = 1, DOCUMENT = 2


cdef class SpanDrawer:
    """Draws the objective of a text, its blanks and the order of their answers.

    Args:
        eos_id, cls_id: command tokens, which no blank takes (but the end of a document that is generated).
        probabilities: of a single span, of the token, sentence and document objective.
        ratios: of the token and the sentence objective; the document objective's least share.
        gpt_infill_prob: as of `BlankInfillingConfig`.
        length_weights: running sums of the weights of the span lengths 1, 2, ...
        sentence_ends: [V], not zero for ids whose text ends a sentence.
        shuffle_blocks: whether answers are in random order.
    """

    def __init__(
        self,
        int64_t eos_id,
        int64_t cls_id,
        probabilities,
        ratios,
        double gpt_infill_prob,
        length_weights,
        sentence_ends,
        bint shuffle_blocks,
    ):
        self.arguments = (
            eos_id, cls_id, probabilities, ratios, gpt_infill_prob, length_weights, sentence_ends, shuffle_blocks
        )
        self.eos_id, self.cls_id = eos_id, cls_id
        self.single_span_prob, self.bert_prob, self.gap_sentence_prob, self.gpt_prob = probabilities
        self.bert_ratio, self.gap_sentence_ratio, self.gpt_min_ratio = ratios
        self.gpt_infill_prob = gpt_infill_prob
        self.shuffle_blocks = shuffle_blocks
        self.ends_array = np.array(sentence_ends, dtype=np.uint8)
        self.weights_array = np.array(length_weights, dtype=np.float64)
        cdef uint8_t[::1] ends = self.ends_array
        cdef double[::1] weights = self.weights_array
        self.ends = ends_of(ends)
        for ratio in (self.bert_ratio, self.gap_sentence_ratio, self.gpt_min_ratio):
            check_ratio(ratio)
        check_weights(weights)
        self.weights = &weights[0]
        self.num_weights = weights.shape[0]

    def __reduce__(self):
        return SpanDrawer, self.arguments

    def sample(self, const int64_t[::1] tokens, SampleRandom rng):
        """The blanks of one text, int64 [N].

        Returns:
            the objective's number, spans int64 [K, 2], the order of their answers int64 [K], append_end.
        """
        cdef Py_ssize_t size = tokens.shape[0]
        spans_array = np.empty((size + 1, 2), dtype=np.int64)
        order_array = np.empty(size + 1, dtype=np.int64)
        cdef int64_t[:, ::1] spans = spans_array
        cdef int64_t[::1] order = order_array, scratch = np.empty(scratch_size(size), dtype=np.int64)
        cdef Drawn drawn
        with nogil:
            drawn = self.draw(&rng.state, first(tokens), size, &scratch[0], <Span*>&spans[0, 0], &order[0])
        return (
            drawn.objective,
            spans_array[: drawn.count].copy(),
            order_array[: drawn.count].copy(),
            bool(drawn.append_end),
        )

    cdef Drawn draw(
        self, RandomState* state, const int64_t* tokens, Py_ssize_t size, int64_t* scratch, Span* spans, int64_t* order
    ) noexcept nogil:
        """The blanks of a text of `size` tokens.

        Args:
            state: the sample's random stream.
            scratch: [scratch_size(size)].
            spans, order: written; room for as many as may be drawn (`blank_config.max_sample_length`).
        """
        cdef Drawn drawn
        cdef bint single = False, is_suffix = False
        cdef Py_ssize_t number
        drawn.objective = TOKEN
        if next_uniform(state) < self.single_span_prob:
            single = True
        else:
            drawn.objective = self.draw_objective(next_uniform(state))
        if drawn.objective == TOKEN:
            drawn.count = draw_token_spans(
                state, tokens, size, self.eos_id, self.cls_id, self.bert_ratio, self.weights, self.num_weights,
                single, scratch, spans
            )
        elif drawn.objective == SENTENCE:
            drawn.count = draw_sentence_spans(
                state, tokens, size, self.eos_id, self.cls_id, self.gap_sentence_ratio, self.ends, scratch, spans
            )
        else:
            drawn.count = draw_document_span(
                state, tokens, size, self.eos_id, self.cls_id, self.gpt_infill_prob, self.gpt_min_ratio,
                scratch, spans, &is_suffix
            )
        drawn.append_end = not is_suffix
        for number in range(drawn.count):
            order[number] = number
        if self.shuffle_blocks:
            shuffle_indices(state, order, drawn.count)
        return drawn

    cdef int draw_objective(self, double drawn) noexcept nogil:
        if drawn < self.bert_prob:
            return TOKEN
        if drawn < self.bert_prob + self.gap_sentence_prob or self.gpt_prob < 1e-9:
            return SENTENCE if self.gap_sentence_prob > 0.0 else TOKEN
        return DOCUMENT


cdef int check_ratio(double ratio) except -1:
    """Above 1, more spans would be drawn than the scratch space holds."""
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"a ratio is {ratio}; it must be in [0, 1]")
    return 0


cdef int check_weights(const double[::1] weights) except -1:
    if weights.shape[0] == 0 or not 0.0 < weights[weights.shape[0] - 1] < float("inf"):
        raise ValueError("the weights of the lengths sum to zero; at least one must be above zero")
    return 0


cdef inline const int64_t* first(const int64_t[::1] values) noexcept nogil:
    return &values[0] if values.shape[0] else NULL


cdef Py_ssize_t find_segments(
    const int64_t* tokens, Py_ssize_t size, int64_t eos_id, int64_t cls_id, Span* segments
) noexcept nogil:
    """Writes each run of text between [CLS] and end-of-document tokens; returns their number."""
    cdef Py_ssize_t place = 0, count = 0, start
    while place < size:
        start = place
        while place < size and tokens[place] != eos_id and tokens[place] != cls_id:
            place += 1
        if place > start:
            segments[count].start = start
            segments[count].end = place
            count += 1
        place += 1
    return count


cdef Py_ssize_t draw_segment(RandomState* state, const Span* segments, Py_ssize_t count) noexcept nogil:
    """A segment, with probability in proportion to its length."""
    cdef Py_ssize_t number
    cdef int64_t total = 0, drawn
    for number in range(count):
        total += segments[number].end - segments[number].start
    drawn = next_below(state, total)
    for number in range(count):
        drawn -= segments[number].end - segments[number].start
        if drawn < 0:
            return number
    return count - 1


cdef void place_spans(
    RandomState* state, int64_t start, int64_t length, const int64_t* span_lengths, Py_ssize_t count,
    int64_t* scratch, Span* spans
) noexcept nogil:
    """Puts `count` spans, in their order, at random into a segment, at least one token apart from each other."""
    cdef int64_t free = length
    cdef Py_ssize_t number
    for number in range(count):
        free -= span_lengths[number]
    free -= count - 1
    for number in range(count):
        scratch[number] = next_below(state, free + 1)
    sort_values(scratch, count)
    for number in range(count):
        spans[number].start = start + scratch[number]
        spans[number].end = start + scratch[number] + span_lengths[number]
        start += span_lengths[number] + 1


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


cdef Py_ssize_t draw_token_spans(
    RandomState* state, const int64_t* tokens, Py_ssize_t size, int64_t eos_id, int64_t cls_id, double ratio,
    const double* weights, Py_ssize_t num_weights, bint single, int64_t* scratch, Span* spans
) noexcept nogil:
    """Short random spans that cover about `ratio` of the tokens, at least one token apart; returns their number.

    Span lengths are drawn until they cover int(ratio * size) tokens (at least one); none is longer than fits into the
    longest document. They are assigned to the documents from the shortest to the longest, so that the documents so
    far have, to half a span, their share of all that is covered; the longest takes the rest. A length for which
    a document is too short goes to a later one. What fits nowhere is left out.

    Args:
        ratio: share of the tokens to cover.
        weights: [num_weights], running sums of the weights of the lengths 1, 2, ...
        single: draw one span only, in a document drawn in proportion to its length.
        scratch: [scratch_size(size)].
        spans: written, sorted; none only where there is no text at all.
    """
    cdef Span* segments = <Span*>scratch
    cdef int64_t* lengths = scratch + 2 * (size + 1)
    cdef int64_t* places = lengths + size + 1
    cdef Py_ssize_t segment_count, drawn = 0, used = 0, taken, number, found
    cdef int64_t wanted, drawn_total = 0, text_total = 0, longest = 0, length, seen = 0, covered = 0, covered_here
    segment_count = find_segments(tokens, size, eos_id, cls_id, segments)
    if segment_count == 0:
        return 0
    for number in range(segment_count):
        length = segments[number].end - segments[number].start
        text_total += length
        longest = max(longest, length)
    wanted = 1 if single else max(1, <int64_t>(ratio * size))
    while drawn_total < wanted:
        length = 1 + search_cumulative(weights, num_weights, next_uniform(state) * weights[num_weights - 1])
        lengths[drawn] = min(length, max(1, longest - 1))
        drawn_total += lengths[drawn]
        drawn += 1

    if single:
        number = draw_segment(state, segments, segment_count)
        length = segments[number].end - segments[number].start
        lengths[0] = min(lengths[0], max(1, length - 1))  # a token stays where there are two or more
        place_spans(state, segments[number].start, length, lengths, 1, places, spans)
        return 1
    # the draw that reached the mark is longer than the others on average: it must not always come last
    shuffle_indices(state, lengths, drawn)
    sort_spans(segments, segment_count, by_length=True)
    for number in range(segment_count):
        length = segments[number].end - segments[number].start
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
            place_spans(state, segments[number].start, length, lengths + used, taken, places, spans + used)
            used += taken
            covered += covered_here
    if segment_count > 1:
        sort_spans(spans, used, by_length=False)
    return used


cdef Py_ssize_t draw_sentence_spans(
    RandomState* state, const int64_t* tokens, Py_ssize_t size, int64_t eos_id, int64_t cls_id, double ratio,
    SentenceEnds ends, int64_t* scratch, Span* spans
) noexcept nogil:
    """Whole sentences in random order until they cover int(ratio * size) tokens (at least one); returns their number.

    What follows the last end of a sentence in a document is a sentence, too. The spans are sorted and may touch.
    """
    cdef Span* segments = <Span*>scratch
    cdef Span* sentences = segments + size + 1
    cdef int64_t* order = <int64_t*>(sentences + size + 1)
    cdef Py_ssize_t segment_count, count = 0, number, place, used = 0
    cdef int64_t start, end, covered = 0, wanted
    segment_count = find_segments(tokens, size, eos_id, cls_id, segments)
    for number in range(segment_count):
        start = segments[number].start
        end = segments[number].end
        for place in range(start, end):
            if place == end - 1 or ends_sentence(tokens, place, end, ends):
                sentences[count].start = start
                sentences[count].end = place + 1
                start = place + 1
                order[count] = count
                count += 1
    shuffle_indices(state, order, count)
    wanted = max(1, <int64_t>(ratio * size))
    while used < count and covered < wanted:
        number = order[used]
        covered += sentences[number].end - sentences[number].start
        used += 1
    sort_values(order, used)
    for number in range(used):
        spans[number] = sentences[order[number]]
    return used


cdef Py_ssize_t draw_document_span(
    RandomState* state, const int64_t* tokens, Py_ssize_t size, int64_t eos_id, int64_t cls_id, double suffix_prob,
    double min_ratio, int64_t* scratch, Span* spans, bint* is_suffix
) noexcept nogil:
    """One long span, the end of a document or a stretch inside it; returns 1, or 0 where there is no text.

    The document is drawn in proportion to its length n, the span's length uniformly between min_ratio * n and
    n - 1 tokens. Where several documents are packed it is always a document's end, which takes the
    end-of-document token with it, if there is one.

    Args:
        suffix_prob: probability of the end of the document where there is one document only.
        min_ratio: least share of the document.
        is_suffix: set to whether the span is the end of a document.
    """
    cdef Span* segments = <Span*>scratch
    cdef Py_ssize_t count = find_segments(tokens, size, eos_id, cls_id, segments), number
    cdef int64_t start, end, shortest, longest, length
    is_suffix[0] = False
    if count == 0:
        return 0
    number = draw_segment(state, segments, count)
    start = segments[number].start
    end = segments[number].end
    longest = max(1, end - start - 1)
    shortest = min(longest, max(1, <int64_t>(min_ratio * (end - start))))
    length = shortest + next_below(state, longest - shortest + 1)
    if count > 1 or next_uniform(state) < suffix_prob:
        is_suffix[0] = True
        start = end - length
        if end < size and tokens[end] == eos_id:
            end += 1
    else:
        start += next_below(state, end - start - length + 1)
        end = start + length
    spans[0].start = start
    spans[0].end = end
    return 1
