"""Kernel of documents: reads them; draws them by their length and cuts them, at sentences, into one text."""

import numpy as np

from libc.stdint cimport int8_t, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

from ftk.data.corpora._sentence_ends cimport SentenceEnds, ends_of, ends_sentence
from ftk.data.random cimport RandomState, SampleRandom, next_below, next_uniform

from ftk.errors import UserError

cdef Py_ssize_t LEAST_ROOM = 3  # [CLS], a token, end of document
cdef Py_ssize_t SHORTEST_CUT = 32


cdef class DocumentReader:
    """Reads documents of a corpus.

    Args:
        documents: documents[number] is an array of integers. Where they have `tokens`, all documents back to back, or
            `pool`, which holds document d from token `starts[d]` on, they are read from there, without Python.
        cumulative: int64 [D], running sums of the documents' lengths; the last is above zero.
        vocab_size: V. Other ids than 0 .. V - 1 in a document are an error.
    """

    def __init__(self, documents, cumulative, Py_ssize_t vocab_size):
        self.documents = documents
        self.cumulative_array = np.ascontiguousarray(cumulative, dtype=np.int64)
        cdef const int64_t[::1] sums = self.cumulative_array
        if sums.shape[0] == 0 or sums[sums.shape[0] - 1] <= 0:
            raise ValueError(f"{sums.shape[0]} documents without a token")
        self.cumulative = &sums[0]
        self.num_documents, self.vocab_size = sums.shape[0], vocab_size
        self.tokens, self.starts = NULL, NULL
        tokens, pool = getattr(documents, "tokens", None), getattr(documents, "pool", None)
        if _can_be_read(tokens) and len(tokens) == sums[sums.shape[0] - 1]:
            self.read_from(tokens)
        elif _can_be_read(pool):
            self.read_from(pool)
            self.place(np.ascontiguousarray(documents.starts, dtype=np.int64))

    cdef read_from(self, tokens):
        self.tokens_array = tokens
        self.tokens = <const char*>address(tokens)
        self.itemsize = tokens.dtype.itemsize
        self.num_tokens = len(tokens)
        self.kind = ord(_kind(tokens.dtype))

    cdef place(self, starts_array):
        cdef const int64_t[::1] starts = starts_array
        sizes = np.diff(self.cumulative_array, prepend=0)
        if len(starts_array) != len(sizes) or (starts_array < 0).any() or (
            (starts_array + sizes > len(self.tokens_array)).any()
        ):
            raise ValueError("the documents do not lie within their pool")
        self.starts_array = starts_array
        self.starts = &starts[0]

    cdef int fetch(self, Py_ssize_t number, Document* document, void* keeper) except -1 nogil:
        cdef Py_ssize_t start
        if self.tokens == NULL:
            return self.fetch_object(number, document, keeper)
        start = self.cumulative[number - 1] if number > 0 else 0
        document.length = self.cumulative[number] - start
        if self.starts != NULL:
            start = self.starts[number]
        if document.length < 0 or start < 0 or start > self.num_tokens - document.length:
            self.refuse(number, "does not lie within the tokens; the index is altered")
        document.tokens = self.tokens + start * self.itemsize
        document.kind = self.kind
        return 0

    cdef int copy(
        self, Py_ssize_t number, int64_t* out, const Document* document, Py_ssize_t first, Py_ssize_t count
    ) except -1 nogil:
        """Copies a part of a document; raises UserError if an id is outside of the vocabulary."""
        cdef int64_t last = self.vocab_size - 1
        cdef Py_ssize_t place
        if copy_within(out, document, first, count, last):
            return 0
        for place in range(count):
            if not 0 <= out[place] <= last:
                break
        with gil:
            self.refuse(
                number,
                f"holds token {out[place]}, outside the vocabulary of {last + 1}; another tokenizer made it, or it is "
                "altered"
            )
        return 0

    cdef int refuse(self, Py_ssize_t number, str what) except -1 with gil:
        documents = self.documents
        while hasattr(documents, "numbers"):  # some of others
            number, documents = documents.numbers[number], documents.documents
        name = getattr(getattr(documents, "dataset", documents), "prefix", None)
        raise UserError(f"{'' if name is None else f'{name}.bin: '}document {number} {what}")

    cdef int fetch_object(self, Py_ssize_t number, Document* document, void* keeper) except -1 with gil:
        found = np.ascontiguousarray(self.documents[number])
        if not _can_be_read(found):
            found = found.astype(np.int64)
        (<list>keeper)[0] = found
        document.tokens = <const void*>address(found)
        document.length = len(found)
        document.kind = ord(_kind(found.dtype))
        return 0


cdef class TextPacker(DocumentReader):
    """Draws texts of at most seq_length tokens; see `ftk.data.corpora.documents.DocumentPacker`.

    Args:
        documents, cumulative: as of `DocumentReader`.
        sentence_ends: [V], not zero for ids whose text ends a sentence.
        eos_id, cls_id: command tokens.
        seq_length, short_seq_prob, non_sentence_start, one_document: as of `DocumentPacker`.
    """

    def __init__(
        self,
        documents,
        cumulative,
        sentence_ends,
        int64_t eos_id,
        int64_t cls_id,
        Py_ssize_t seq_length,
        double short_seq_prob,
        double non_sentence_start,
        bint one_document,
    ):
        self.arguments = (
            documents, cumulative, sentence_ends, eos_id, cls_id, seq_length, short_seq_prob, non_sentence_start,
            one_document,
        )
        super().__init__(documents, cumulative, len(sentence_ends))
        if seq_length < 2:
            raise ValueError(f"texts of {seq_length} tokens")
        self.ends_array = np.array(sentence_ends, dtype=np.uint8)
        cdef const uint8_t[::1] ends = self.ends_array
        self.ends = ends_of(ends)
        self.eos_id, self.cls_id = eos_id, cls_id
        self.seq_length = seq_length
        self.short_seq_prob, self.non_sentence_start = short_seq_prob, non_sentence_start
        self.one_document = one_document

    def __reduce__(self):
        return TextPacker, self.arguments

    def pack(self, SampleRandom rng):
        """One text, int64 [N]."""
        text = np.empty(self.seq_length, dtype=np.int64)
        cdef int64_t[::1] out = text
        cdef int64_t[::1] starts = np.empty(most_documents(self.seq_length), dtype=np.int64)
        cdef int64_t[::1] window = np.empty(self.seq_length + 2, dtype=np.int64)
        cdef int64_t num_starts
        cdef Py_ssize_t size
        keeper = [None]
        cdef void* kept = <void*>keeper
        with nogil:
            size = self.pack_into(&rng.state, &out[0], &starts[0], &num_starts, &window[0], self.seq_length, kept)
        return text[:size]

    cdef Py_ssize_t pack_into(
        self, RandomState* state, int64_t* text, int64_t* starts, int64_t* num_starts, int64_t* window,
        Py_ssize_t longest, void* keeper
    ) except -1 nogil:
        """Writes one text; returns its length.

        Args:
            state: the sample's random stream.
            text: [seq_length].
            starts: [most_documents(seq_length)], set to where in the text each document begins.
            num_starts: set to their number.
            window: [seq_length + 2] of scratch.
            longest: tokens of the text at most, 2 to seq_length.
            keeper: a list of one element, which holds what is being read.
        """
        cdef Document document
        cdef Py_ssize_t number = find_document(self.cumulative, self.num_documents, next_uniform(state))
        cdef Py_ssize_t room = longest, used = 0, count = 0, shortest, start, length, free, end
        if self.short_seq_prob > 0.0 and next_uniform(state) < self.short_seq_prob:
            shortest = min(SHORTEST_CUT, longest // 2)
            room = shortest + next_below(state, longest - shortest)
        while True:
            self.fetch_text(number, &document, keeper)
            free = room - used
            start = 0
            if used == 0 and document.length + 2 > free:
                start = self.random_start(state, &document, free, window)
            starts[count] = used
            count += 1
            text[used] = self.cls_id
            length = document.length - start
            if length + 2 > free:
                self.copy(number, text + used + 1, &document, start, free - 1)
                end = start_before(text + used, free, free, self.ends)
                used += end if end >= max(2, free // 2) else free
                break
            self.copy(number, text + used + 1, &document, start, length)
            text[used + 1 + length] = self.eos_id
            used += length + 2
            if self.one_document or room - used < LEAST_ROOM:
                break
            number = find_document(self.cumulative, self.num_documents, next_uniform(state))
        num_starts[0] = count
        return used

    cdef int fetch_text(self, Py_ssize_t number, Document* document, void* keeper) except -1 nogil:
        """A document without the end-of-document token that preprocessing may have stored with it."""
        cdef int64_t last
        self.fetch(number, document, keeper)
        if document.length > 0:
            copy_tokens(&last, document, document.length - 1, 1)
            if last == self.eos_id:
                document.length -= 1
        return 0

    cdef Py_ssize_t random_start(
        self, RandomState* state, const Document* document, Py_ssize_t room, int64_t* window
    ) noexcept nogil:
        """Where to cut a document that is too long: at random, so that even the last place fills the room.

        The place moves to the start of a sentence, the nearest before or the nearest after it, if there is one
        within half the room.
        """
        cdef Py_ssize_t start = next_below(state, document.length + 2 - room + 1)
        cdef Py_ssize_t reach = room // 2, first, size, before, after
        if start == 0 or next_uniform(state) < self.non_sentence_start:
            return start
        first = max(0, start - reach)
        size = min(document.length, start + reach + 1) - first
        copy_tokens(window, document, first, size)
        before = start_before(window, size, start - first, self.ends)
        if before < 0 and first == 0:
            before = 0
        after = start_after(window, size, start - first, self.ends)
        if next_uniform(state) >= 0.5:
            before, after = after, before
        if before >= 0:
            return first + before
        return first + after if after >= 0 else start


cdef size_t address(array):
    return array.__array_interface__["data"][0]


def _kind(dtype):
    """The character of an integer type, the same on every machine: b h i q signed, B H I Q unsigned."""
    return "bhiqBHIQ"[dtype.itemsize.bit_length() - 1 + (4 if dtype.kind == "u" else 0)]


def _can_be_read(tokens):
    """Whether it is an array of integers in the machine's own order of bytes."""
    if not isinstance(tokens, np.ndarray) or tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        return False
    return tokens.dtype.isnative and tokens.flags.c_contiguous and tokens.flags.aligned


cdef bint copy_within(
    int64_t* out, const Document* document, Py_ssize_t first, Py_ssize_t count, int64_t last
) noexcept nogil:
    """Copies a part of a document; whether all its ids are in 0 .. last. No loop has a branch."""
    cdef Py_ssize_t place
    cdef uint16_t short_token, most = 0
    cdef int64_t outside = 0
    if document.kind == b"H" and last < 0xFFFF:
        for place in range(count):
            short_token = (<const uint16_t*>document.tokens)[first + place]
            out[place] = short_token
            most = max(most, short_token)
        return most <= last
    copy_tokens(out, document, first, count)
    for place in range(count):
        outside |= out[place] | (last - out[place])  # below zero where one of them is
    return outside >= 0


cdef void copy_tokens(int64_t* out, const Document* document, Py_ssize_t first, Py_ssize_t count) noexcept nogil:
    """Copies a part of a document, whatever the size of its tokens."""
    cdef Py_ssize_t place
    cdef char kind = document.kind
    if kind == b"H":
        for place in range(count):
            out[place] = (<const uint16_t*>document.tokens)[first + place]
    elif kind == b"i":
        for place in range(count):
            out[place] = (<const int32_t*>document.tokens)[first + place]
    elif kind == b"q" or kind == b"Q":
        for place in range(count):
            out[place] = (<const int64_t*>document.tokens)[first + place]
    elif kind == b"h":
        for place in range(count):
            out[place] = (<const int16_t*>document.tokens)[first + place]
    elif kind == b"B":
        for place in range(count):
            out[place] = (<const uint8_t*>document.tokens)[first + place]
    elif kind == b"b":
        for place in range(count):
            out[place] = (<const int8_t*>document.tokens)[first + place]
    else:
        for place in range(count):
            out[place] = (<const uint32_t*>document.tokens)[first + place]


cdef Py_ssize_t find_document(const int64_t* cumulative, Py_ssize_t count, double drawn) noexcept nogil:
    """The document that holds token int(drawn * total): one in proportion to its length."""
    cdef Py_ssize_t low = 0, high = count - 1, middle
    cdef int64_t token = <int64_t>(drawn * cumulative[high])
    while low < high:
        middle = (low + high) >> 1
        if cumulative[middle] > token:
            high = middle
        else:
            low = middle + 1
    return low


cdef Py_ssize_t start_before(
    const int64_t* tokens, Py_ssize_t size, Py_ssize_t place, SentenceEnds ends
) noexcept nogil:
    """The nearest place <= `place` after which a sentence starts, or -1. Place 0 does not count by itself."""
    cdef Py_ssize_t start
    for start in range(place, 0, -1):
        if ends_sentence(tokens, start - 1, size, ends):
            return start
    return -1


cdef Py_ssize_t start_after(
    const int64_t* tokens, Py_ssize_t size, Py_ssize_t place, SentenceEnds ends
) noexcept nogil:
    """The nearest place >= `place` where a sentence starts and at least one token follows, or -1."""
    cdef Py_ssize_t start
    for start in range(max(place, 1), size):
        if ends_sentence(tokens, start - 1, size, ends):
            return start
    return -1
