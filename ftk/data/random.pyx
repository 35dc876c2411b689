"""Random streams of samples: a small generator whose stream is a pure function of (seed, epoch, index).

The three numbers are mixed by splitmix64 (Steele, Lea and Flood 2014) into the state of xoshiro256**
(Blackman and Vigna 2021). Making one costs a few nanoseconds, so that every sample has its own, and the
same sample comes out whatever the number of workers, ranks or restarts.
"""

import numpy as np

from libc.stdint cimport int64_t, uint64_t

cdef uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15


cdef inline uint64_t finalize(uint64_t value) noexcept nogil:
    """The output function of splitmix64."""
    value = (value ^ (value >> 30)) * <uint64_t>0xBF58476D1CE4E5B9
    value = (value ^ (value >> 27)) * <uint64_t>0x94D049BB133111EB
    return value ^ (value >> 31)


cdef inline uint64_t mixed_key(uint64_t seed, uint64_t epoch, uint64_t index) noexcept nogil:
    """The start of splitmix64 for one sample; each number is spread over all bits before the next comes in."""
    cdef uint64_t key = finalize(seed + GOLDEN_GAMMA)
    key = finalize((key ^ epoch) + GOLDEN_GAMMA)
    return finalize((key ^ index) + GOLDEN_GAMMA)


cdef void start_stream(RandomState* state, uint64_t seed, uint64_t epoch, uint64_t index) noexcept nogil:
    """Puts a stream at the beginning of one sample."""
    cdef uint64_t key = mixed_key(seed, epoch, index)
    state.s0 = finalize(key + GOLDEN_GAMMA)
    state.s1 = finalize(key + 2 * GOLDEN_GAMMA)
    state.s2 = finalize(key + 3 * GOLDEN_GAMMA)
    state.s3 = finalize(key + 4 * GOLDEN_GAMMA)


cdef class SampleRandom:
    """The random stream of one sample.

    Args:
        seed, epoch, index: integers that fit 64 bits; negative ones count as their two's complement.
    """

    def __init__(self, seed, epoch, index):
        start_stream(&self.state, _word(seed), _word(epoch), _word(index))

    def word(self):
        """64 random bits as an int."""
        return next_word(&self.state)

    def uniform(self):
        """A float in [0, 1)."""
        return next_uniform(&self.state)

    def below(self, int64_t bound):
        """An int in [0, bound), each equally likely.

        Raises:
            ValueError: bound is below 1.
        """
        if bound < 1:
            raise ValueError(f"bound is {bound}; it must be at least 1")
        return next_below(&self.state, bound)

    def shuffle(self, int64_t[::1] array):
        """Shuffles an int64 array in place (Fisher-Yates)."""
        if array.shape[0] > 1:
            with nogil:
                shuffle_indices(&self.state, &array[0], array.shape[0])

    def permutation(self, Py_ssize_t count):
        """The numbers 0 .. count-1 in random order, int64 [count]."""
        order = np.arange(count, dtype=np.int64)
        self.shuffle(order)
        return order


def hash_uniform(seed, epoch, indices):
    """The first `uniform()` of the streams of many samples at once.

    Args:
        seed, epoch: as of SampleRandom.
        indices: integer array [N].

    Returns:
        float64 [N]; element n equals `SampleRandom(seed, epoch, indices[n]).uniform()`.
    """
    values = np.ascontiguousarray(indices)
    cdef const uint64_t[::1] words = values.astype(np.int64, copy=False).view(np.uint64).reshape(-1)
    result = np.empty(words.shape[0], dtype=np.float64)
    cdef double[::1] out = result
    cdef uint64_t seed_word = _word(seed), epoch_word = _word(epoch), second
    cdef Py_ssize_t place
    with nogil:
        for place in range(words.shape[0]):
            # the first word of xoshiro256** depends on its second state word only
            second = finalize(mixed_key(seed_word, epoch_word, words[place]) + 2 * GOLDEN_GAMMA)
            out[place] = <double>((rotate_left(second * 5, 7) * 9) >> 11) * (1.0 / 9007199254740992.0)
    return result


def _word(number):
    return int(number) & 0xFFFFFFFFFFFFFFFF
