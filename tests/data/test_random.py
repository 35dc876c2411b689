"""Random streams of samples: equal to the slow version, uniform, independent of each other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_random import SlowRandom

from ftk.data.random import SampleRandom, hash_uniform

KNOWN_WORDS = [7162456417423348224, 9315562905607891352, 5829451009829218788]
keys = st.tuples(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**63 - 1))


@given(keys)
@settings(max_examples=50, deadline=None)
def test_words_equal_the_published_generators(key):
    fast, slow = SampleRandom(*key), SlowRandom(*key)
    assert [fast.word() for _ in range(20)] == [slow.word() for _ in range(20)]


@given(keys, st.lists(st.integers(1, 2**62), min_size=1, max_size=20))
@settings(max_examples=50, deadline=None)
def test_draws_equal_the_slow_version(key, bounds):
    fast, slow = SampleRandom(*key), SlowRandom(*key)
    assert [fast.below(bound) for bound in bounds] == [slow.below(bound) for bound in bounds]
    assert [fast.uniform() for _ in range(5)] == [slow.uniform() for _ in range(5)]
    values = list(range(len(bounds)))
    shuffled = np.array(values, dtype=np.int64)
    fast.shuffle(shuffled)
    slow.shuffle(values)
    assert shuffled.tolist() == values


def test_known_first_words_of_the_stream():
    """Fixed for good: a change would alter every run's data."""
    rng = SampleRandom(1234, 1, 0)
    assert [rng.word() for _ in range(3)] == KNOWN_WORDS


def test_hash_uniform_is_the_first_uniform_of_each_stream():
    indices = np.array([0, 1, 2, 77, 2**40])
    expected = [SampleRandom(5, 3, int(index)).uniform() for index in indices]
    assert hash_uniform(5, 3, indices).tolist() == expected
    assert hash_uniform(5, 3, indices.astype(np.int32)[:4]).tolist() == expected[:4]


def test_below_is_uniform():
    rng = SampleRandom(7, 0, 0)
    counts = np.bincount([rng.below(7) for _ in range(70_000)], minlength=7)
    chi_square = ((counts - 10_000) ** 2 / 10_000).sum()
    assert chi_square < 22.5  # 0.1 % point at 6 degrees of freedom


def test_first_draws_of_neighbouring_samples_are_uniform_and_uncorrelated():
    values = hash_uniform(1, 1, np.arange(100_000))
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 85.4  # 0.1 % point at 49 degrees of freedom
    for other in (values[1:], hash_uniform(1, 2, np.arange(99_999)), hash_uniform(2, 1, np.arange(99_999))):
        assert abs(np.corrcoef(values[: len(other)], other)[0, 1]) < 0.012


def test_permutation_holds_each_number_once_and_every_order_of_three_is_equally_likely():
    assert sorted(SampleRandom(1, 1, 1).permutation(1000).tolist()) == list(range(1000))
    orders: dict[tuple[int, ...], int] = {}
    for index in range(6000):
        order = tuple(SampleRandom(3, 1, index).permutation(3).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 6
    assert sum((count - 1000) ** 2 / 1000 for count in orders.values()) < 20.5  # 0.1 % point, 5 degrees


def test_nothing_to_draw_from_is_refused():
    rng = SampleRandom(0, 0, 0)
    with pytest.raises(ValueError, match="bound is 0"):
        rng.below(0)
    rng.shuffle(np.zeros(0, dtype=np.int64))
