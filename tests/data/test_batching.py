"""Batching by samples and by tokens, against a slow version."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.data.batches.batching import batch_by_size
from ftk.errors import UserError


def slow_bounds(sizes, batch_size, max_tokens, multiple):
    """One batch after the other: the most samples that fit, cut to the multiple."""
    bounds = [0]
    while bounds[-1] < len(sizes):
        start = bounds[-1]
        fitting = [
            stop
            for stop in range(start + 1, len(sizes) + 1)
            if (batch_size is None or stop - start <= batch_size)
            and (max_tokens is None or max(sizes[start:stop]) * (stop - start) <= max_tokens)
        ]
        count = max(fitting) - start
        bounds.append(start + (count // multiple * multiple if count > multiple else count))
    return bounds


@given(
    st.lists(st.integers(1, 50), max_size=60),
    st.none() | st.integers(1, 12),
    st.none() | st.integers(50, 300),
    st.integers(1, 8),
)
@settings(max_examples=400, deadline=None)
def test_bounds_equal_the_slow_version(sizes, batch_size, max_tokens, multiple):
    if batch_size is None and max_tokens is None:
        max_tokens = 100
    array = np.array(sizes, dtype=np.int32)
    bounds = batch_by_size(array, batch_size=batch_size, max_tokens=max_tokens, required_batch_size_multiple=multiple)
    assert bounds.tolist() == slow_bounds(sizes, batch_size, max_tokens, multiple)
    for place in bounds.tolist()[1:-1]:
        rest = batch_by_size(
            array[place:], batch_size=batch_size, max_tokens=max_tokens, required_batch_size_multiple=multiple
        )
        assert set((rest + place).tolist()) == {bound for bound in bounds.tolist() if bound >= place}


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint16])
def test_any_integer_type(dtype):
    assert batch_by_size(np.array([3, 4, 5], dtype=dtype), max_tokens=8).tolist() == [0, 2, 3]


def test_long_samples_do_not_overflow():
    sizes = np.full(5, 2**30, dtype=np.int64)
    assert batch_by_size(sizes, max_tokens=2**32).tolist() == [0, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "`batch_size` or `max_tokens`"),
        ({"batch_size": 0}, "`batch_size` 0"),
        ({"max_tokens": -1}, "`max_tokens` -1"),
        ({"batch_size": 2, "required_batch_size_multiple": 0}, "`required_batch_size_multiple` 0"),
        ({"max_tokens": 4}, "a sample can have 5 tokens"),
    ],
)
def test_wrong_limits_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        batch_by_size(np.array([3, 5]), **options)
