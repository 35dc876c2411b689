# Reading documents, and packing them into a text, for kernels (without the GIL, unless documents are objects).

from libc.stdint cimport int64_t

from ftk.data.corpora._sentence_ends cimport SentenceEnds
from ftk.data.random cimport RandomState


cdef struct Document:
    const void* tokens
    Py_ssize_t length
    char kind  # the NumPy character of the tokens' dtype


cdef inline Py_ssize_t most_documents(Py_ssize_t seq_length) noexcept nogil:
    """Documents in one text; even an empty one takes two tokens."""
    return seq_length // 2 + 1


cdef class DocumentReader:
    cdef object documents, tokens_array, starts_array, cumulative_array
    cdef const int64_t* cumulative
    cdef Py_ssize_t num_documents, vocab_size
    cdef const char* tokens  # all documents; NULL where each is an object of its own
    cdef const int64_t* starts  # [num_documents], where each begins in `tokens`; NULL where they lie back to back
    cdef Py_ssize_t itemsize, num_tokens
    cdef char kind

    cdef read_from(self, tokens)
    cdef place(self, starts_array)
    cdef int fetch(self, Py_ssize_t number, Document* document, void* keeper) except -1 nogil
    cdef int copy(
        self, Py_ssize_t number, int64_t* out, const Document* document, Py_ssize_t first, Py_ssize_t count
    ) except -1 nogil
    cdef int refuse(self, Py_ssize_t number, str what) except -1 with gil
    cdef int fetch_object(self, Py_ssize_t number, Document* document, void* keeper) except -1 with gil


cdef class TextPacker(DocumentReader):
    cdef tuple arguments
    cdef object ends_array
    cdef SentenceEnds ends
    cdef int64_t eos_id, cls_id
    cdef Py_ssize_t seq_length
    cdef double short_seq_prob, non_sentence_start
    cdef bint one_document

    cdef Py_ssize_t pack_into(
        self, RandomState* state, int64_t* text, int64_t* starts, int64_t* num_starts, int64_t* window,
        Py_ssize_t longest, void* keeper
    ) except -1 nogil
    cdef int fetch_text(self, Py_ssize_t number, Document* document, void* keeper) except -1 nogil
    cdef Py_ssize_t random_start(
        self, RandomState* state, const Document* document, Py_ssize_t room, int64_t* window
    ) noexcept nogil


cdef void copy_tokens(int64_t* out, const Document* document, Py_ssize_t first, Py_ssize_t count) noexcept nogil
