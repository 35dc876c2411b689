"""Kernel of translation: reads documents that are two texts, each closed by the end token."""

import numpy as np

from libc.stdint cimport int32_t, int64_t

from ftk.data.corpora._documents cimport Document, DocumentReader, copy_tokens


cdef class PairReader(DocumentReader):
    """Reads pairs.

    Args:
        documents, cumulative, vocab_size: as of `DocumentReader`.
        end: token that closes a target.
        source_vocab_size, source_end: the same of sources.
    """

    cdef int64_t end, source_end
    cdef DocumentReader sources  # the same documents, for the ids of sources

    def __init__(
        self, documents, cumulative, Py_ssize_t vocab_size, int64_t end, Py_ssize_t source_vocab_size, int64_t source_end
    ):
        super().__init__(documents, cumulative, vocab_size)
        self.sources = DocumentReader(documents, cumulative, source_vocab_size)
        self.end, self.source_end = end, source_end

    def __reduce__(self):
        about = self.vocab_size, self.end, self.sources.vocab_size, self.source_end
        return PairReader, (self.documents, self.cumulative_array, *about)

    def source_sizes(self):
        """Tokens of each first text, its end counted, int32 [D].

        Raises:
            UserError: a document is no pair.
        """
        found = np.empty(self.num_documents, dtype=np.int32)
        cdef int32_t[::1] sizes = found
        cdef Py_ssize_t number, place
        cdef int64_t token, last
        cdef Document document
        keeper = [None]
        cdef void* kept = <void*>keeper
        with nogil:
            for number in range(self.num_documents):
                self.fetch(number, &document, kept)
                place = 0
                token, last = self.source_end + 1, self.end + 1
                while place < document.length and token != self.source_end:
                    copy_tokens(&token, &document, place, 1)
                    place += 1
                if place < document.length:
                    copy_tokens(&last, &document, document.length - 1, 1)
                if last != self.end:
                    self.refuse(
                        number,
                        "is not a pair of texts; preprocess pairs with `source_lang` and `target_lang`"
                    )
                sizes[number] = place
        return found

    def read(
        self,
        const int64_t[::1] numbers,
        const int32_t[::1] source_sizes,
        const int64_t[::1] source_prefix,
        const int64_t[::1] target_prefix,
        const int64_t[::1] source_lengths,
        const int64_t[::1] target_lengths,
        int64_t pad,
    ):
        """Pairs, a prefix in front of each text; of a text that is too long the beginning, and its end token.

        Args:
            numbers: [B], documents.
            source_sizes: [D], of `source_sizes`.
            source_prefix, target_prefix: tokens.
            source_lengths, target_lengths: [B], tokens of what is returned, prefix and end counted.
            pad: fills.

        Returns:
            int64 [B, S] and [B, T].
        """
        cdef Py_ssize_t total = numbers.shape[0], row, first
        sources = np.full((total, max(source_lengths) if total else 0), pad, dtype=np.int64)
        targets = np.full((total, max(target_lengths) if total else 0), pad, dtype=np.int64)
        cdef int64_t[:, ::1] source = sources, target = targets
        cdef DocumentReader reader = self.sources
        cdef Document document
        keeper = [None]
        cdef void* kept = <void*>keeper
        with nogil:
            for row in range(total):
                self.fetch(numbers[row], &document, kept)
                first = source_sizes[numbers[row]]
                lay_out(
                    reader, numbers[row], &source[row, 0], source_lengths[row], source_prefix, &document, 0, first,
                    self.source_end
                )
                lay_out(
                    self, numbers[row], &target[row, 0], target_lengths[row], target_prefix, &document, first,
                    document.length, self.end
                )
        return sources, targets


cdef int lay_out(
    DocumentReader reader, Py_ssize_t number, int64_t* out, Py_ssize_t length, const int64_t[::1] prefix,
    const Document* document, Py_ssize_t start, Py_ssize_t stop, int64_t end
) except -1 nogil:
    cdef Py_ssize_t place, some = min(prefix.shape[0], length - 1)
    for place in range(some):
        out[place] = prefix[place]
    reader.copy(number, out + some, document, start, min(stop - start, length - some))
    out[length - 1] = end
    return 0
