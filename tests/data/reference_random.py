"""Pure Python version of ftk.data.random, by the published definitions of splitmix64 and xoshiro256**."""

from __future__ import annotations

from bisect import bisect_right

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def finalize(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def rotate_left(value: int, bits: int) -> int:
    return ((value << bits) | (value >> (64 - bits))) & MASK


class SlowRandom:
    """SampleRandom, number by number."""

    def __init__(self, seed: int, epoch: int, index: int) -> None:
        key = 0
        for part in (seed, epoch, index):
            key = finalize(((key ^ (part & MASK)) + GAMMA) & MASK)
        self.state = [finalize((key + step * GAMMA) & MASK) for step in (1, 2, 3, 4)]

    def word(self) -> int:
        s0, s1, s2, s3 = self.state
        result = (rotate_left((s1 * 5) & MASK, 7) * 9) & MASK
        shifted = (s1 << 17) & MASK
        s2 ^= s0
        s3 ^= s1
        s1 ^= s2
        s0 ^= s3
        s2 ^= shifted
        s3 = rotate_left(s3, 45)
        self.state = [s0, s1, s2, s3]
        return result

    def uniform(self) -> float:
        return (self.word() >> 11) / (1 << 53)

    def below(self, bound: int) -> int:
        while True:
            word = self.word()
            if word >= (1 << 64) % bound:
                return word % bound

    def shuffle(self, values: list) -> None:
        for place in range(len(values) - 1, 0, -1):
            other = self.below(place + 1)
            values[place], values[other] = values[other], values[place]

    def choice_weighted(self, cumulative: list[float]) -> int:
        return min(bisect_right(cumulative, self.uniform() * cumulative[-1]), len(cumulative) - 1)
