# The state of a sample's random stream and its draws, for the other kernels (all without the GIL).

from libc.stdint cimport int64_t, uint64_t


cdef struct RandomState:
    uint64_t s0
    uint64_t s1
    uint64_t s2
    uint64_t s3


cdef inline uint64_t rotate_left(uint64_t value, int bits) noexcept nogil:
    return (value << bits) | (value >> (64 - bits))


cdef inline uint64_t next_word(RandomState* state) noexcept nogil:
    """64 random bits: one step of xoshiro256**."""
    cdef uint64_t result = rotate_left(state.s1 * 5, 7) * 9
    cdef uint64_t shifted = state.s1 << 17
    state.s2 ^= state.s0
    state.s3 ^= state.s1
    state.s1 ^= state.s2
    state.s0 ^= state.s3
    state.s2 ^= shifted
    state.s3 = rotate_left(state.s3, 45)
    return result


cdef inline double next_uniform(RandomState* state) noexcept nogil:
    """A double in [0, 1), from the upper 53 bits of a word."""
    return <double>(next_word(state) >> 11) * (1.0 / 9007199254740992.0)


cdef inline int64_t next_below(RandomState* state, int64_t bound) noexcept nogil:
    """An integer in [0, bound), every one equally likely: words below 2^64 mod bound are drawn again."""
    cdef uint64_t n = <uint64_t>bound
    cdef uint64_t threshold
    cdef uint64_t word = next_word(state)
    if word < n:  # else it is above the threshold, too, which takes a division to know
        threshold = (0 - n) % n
        while word < threshold:
            word = next_word(state)
    return <int64_t>(word % n)


cdef inline void shuffle_indices(RandomState* state, int64_t* values, Py_ssize_t count) noexcept nogil:
    """Fisher-Yates, from the last place down."""
    cdef Py_ssize_t place, other
    cdef int64_t kept
    for place in range(count - 1, 0, -1):
        other = next_below(state, place + 1)
        kept = values[place]
        values[place] = values[other]
        values[other] = kept


cdef inline Py_ssize_t search_cumulative(const double* cumulative, Py_ssize_t count, double value) noexcept nogil:
    """The first place whose cumulative weight is above value."""
    cdef Py_ssize_t low = 0, high = count - 1, middle
    while low < high:
        middle = (low + high) >> 1
        if cumulative[middle] > value:
            high = middle
        else:
            low = middle + 1
    return low


cdef void start_stream(RandomState* state, uint64_t seed, uint64_t epoch, uint64_t index) noexcept nogil


cdef class SampleRandom:
    cdef RandomState state
