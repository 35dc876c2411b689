"""A set of 64-bit hashes: 10 to 20 bytes for each, whatever their number."""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc, free

import numpy as np

cdef enum:
    SHARDS = 256  # each grows on its own, so that growing never holds two copies of the whole
    FIRST_SLOTS = 64


cdef struct Shard:
    uint64_t* slots  # 0: free
    Py_ssize_t num_slots  # a power of two
    Py_ssize_t count


cdef class HashSet:
    """Remembers 64-bit hashes. `len(seen)` is their number."""

    cdef Shard _shards[SHARDS]
    cdef bint _has_zero

    def __cinit__(self):
        cdef Py_ssize_t i
        for i in range(SHARDS):
            self._shards[i].slots = NULL
            self._shards[i].num_slots = 0
            self._shards[i].count = 0
        self._has_zero = False

    def __dealloc__(self):
        cdef Py_ssize_t i
        for i in range(SHARDS):
            free(self._shards[i].slots)

    def __len__(self):
        cdef Py_ssize_t i, total = self._has_zero
        for i in range(SHARDS):
            total += self._shards[i].count
        return total

    def add(self, const uint64_t[::1] hashes):
        """Takes hashes up.

        Args:
            hashes: [n], evenly distributed.

        Returns:
            [n] bool: whether each was new; of equal ones among them, the first is.
        """
        cdef Py_ssize_t i
        new = np.empty(hashes.shape[0], dtype=np.uint8)
        cdef uint8_t[::1] flags = new
        cdef int found = 0
        with nogil:
            for i in range(hashes.shape[0]):
                found = self._add(hashes[i])
                if found < 0:
                    break
                flags[i] = <uint8_t> found
        if found < 0:
            raise MemoryError(f"no memory for {len(self):,} hashes and more")
        return new.view(np.bool_)

    cdef int _add(self, uint64_t value) noexcept nogil:
        """1 if `value` is new, 0 if not, -1 if there is no memory."""
        cdef Shard* shard
        cdef uint64_t* slot
        if value == 0:
            if self._has_zero:
                return 0
            self._has_zero = True
            return 1
        shard = &self._shards[value >> 56]
        if 5 * (shard.count + 1) > 4 * shard.num_slots and not _grow(shard):
            return -1
        slot = _find(shard, value)
        if slot[0] == value:
            return 0
        slot[0] = value
        shard.count += 1
        return 1


cdef uint64_t* _find(Shard* shard, uint64_t value) noexcept nogil:
    """The slot that holds `value`, or the free one where it belongs."""
    cdef uint64_t mask = <uint64_t> shard.num_slots - 1
    cdef uint64_t at = value & mask
    while shard.slots[at] != 0 and shard.slots[at] != value:
        at = (at + 1) & mask
    return &shard.slots[at]


cdef bint _grow(Shard* shard) noexcept nogil:
    cdef Shard larger
    cdef Py_ssize_t i
    larger.num_slots = max(2 * shard.num_slots, <Py_ssize_t> FIRST_SLOTS)
    larger.count = shard.count
    larger.slots = <uint64_t*> calloc(larger.num_slots, sizeof(uint64_t))
    if larger.slots == NULL:
        return False
    for i in range(shard.num_slots):
        if shard.slots[i] != 0:
            _find(&larger, shard.slots[i])[0] = shard.slots[i]
    free(shard.slots)
    shard[0] = larger
    return True
