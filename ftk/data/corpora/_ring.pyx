"""Kernel of `TokenRing`: reads stretches of a ring of documents, a whole batch in one call."""

import numpy as np

from libc.stdint cimport int64_t

from ftk.data.corpora._documents cimport Document, DocumentReader


cdef class RingReader(DocumentReader):
    """Reads documents, each behind a prefix and closed by an end token, one after the other and round again.

    Args:
        documents, cumulative, vocab_size: as of `DocumentReader`.
        prefix: int64 [P].
        end: token.
    """

    cdef object prefix_array
    cdef const int64_t* prefix
    cdef Py_ssize_t prefix_size
    cdef int64_t end

    def __init__(self, documents, cumulative, Py_ssize_t vocab_size, prefix, int64_t end):
        super().__init__(documents, cumulative, vocab_size)
        self.prefix_array = np.append(np.asarray(prefix, dtype=np.int64), 0)  # never empty
        cdef const int64_t[::1] tokens = self.prefix_array
        self.prefix, self.prefix_size, self.end = &tokens[0], tokens.shape[0] - 1, end

    def __reduce__(self):
        prefix = self.prefix_array[:-1]
        return RingReader, (self.documents, self.cumulative_array, self.vocab_size, prefix, self.end)

    @property
    def total(self):
        """Tokens of the ring."""
        return self.end_of(self.num_documents - 1)

    def read(self, const int64_t[::1] starts, const int64_t[::1] lengths, int64_t pad):
        """Stretches of the ring.

        Args:
            starts: [B], places of the ring.
            lengths: [B].
            pad: stands behind the shorter ones.

        Returns:
            The tokens int64 [B, T]; of each, how many documents have begun behind the first token, int64 [B, T].

        Raises:
            UserError: a token outside the vocabulary; documents that do not lie within the tokens.
        """
        cdef Py_ssize_t rows = starts.shape[0], row, width = max(lengths) if rows else 0
        text = np.full((rows, width), pad, dtype=np.int64)
        numbers = np.zeros((rows, width), dtype=np.int64)
        cdef int64_t[:, ::1] tokens = text, counts = numbers
        keeper = [None]
        cdef void* kept = <void*>keeper
        if width:
            with nogil:
                for row in range(rows):
                    self.read_row(starts[row], lengths[row], &tokens[row, 0], &counts[row, 0], kept)
        return text, numbers

    cdef inline int64_t end_of(self, Py_ssize_t number) noexcept nogil:
        """The place behind a document and its end token."""
        return self.cumulative[number] + (number + 1) * (self.prefix_size + 1)

    cdef int read_row(
        self, int64_t start, Py_ssize_t length, int64_t* tokens, int64_t* counts, void* keeper
    ) except -1 nogil:
        cdef Py_ssize_t low = 0, high = self.num_documents - 1, number, place = 0, inside, room, some, at
        cdef int64_t count = 0
        cdef Document document
        while low < high:
            number = (low + high) >> 1
            if self.end_of(number) > start:
                high = number
            else:
                low = number + 1
        number = low
        inside = start - (self.end_of(number - 1) if number > 0 else 0)
        while place < length:
            room = length - place
            if inside < self.prefix_size:
                some = min(room, self.prefix_size - inside)
                for at in range(some):
                    tokens[place + at] = self.prefix[inside + at]
            else:
                inside -= self.prefix_size
                self.fetch(number, &document, keeper)
                if document.length != self.cumulative[number] - (self.cumulative[number - 1] if number > 0 else 0):
                    self.refuse(number, "is not as long as the index says")
                some = min(room, document.length - inside)
                self.copy(number, tokens + place, &document, inside, some)
                if some < room:
                    tokens[place + some] = self.end
                    some += 1
                inside = -1
            for at in range(some):
                counts[place + at] = count
            place += some
            if inside >= 0:
                inside += some
            else:
                number, inside, count = (number + 1) % self.num_documents, 0, count + 1
        return 0
