"""Axes, ticks, numbers as text, and the thinning of long curves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftk.report.scales import Axis, axis_for, short, thin

NUMBERS = st.floats(-1e12, 1e12)


def test_places_on_a_linear_and_a_logarithmic_axis():
    assert Axis(0.0, 10.0, 100.0, 200.0).place(2.5) == 125.0
    assert Axis(1.0, 100.0, 200.0, 100.0, log=True).place(10.0) == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0.0, 10.0, False, [0, 2, 4, 6, 8, 10]),
        (0.0, 0.3, False, [0.0, 0.1, 0.2, 0.3]),
        (-1.0, 1.0, False, [-1.0, -0.5, 0.0, 0.5, 1.0]),
        (1.0, 10_000.0, True, [1, 10, 100, 1000, 10_000]),
        (1.0, 100.0, True, [1, 3, 10, 30, 100]),
        (1e-9, 1e9, True, [1e-9, 1e-6, 1e-3, 1e0, 1e3, 1e6, 1e9]),
    ],
)
def test_ticks_are_round(low, high, log, ticks):
    assert Axis(low, high, 0.0, 1.0, log).ticks() == pytest.approx(ticks)


@settings(max_examples=200, deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=20), st.booleans(), st.booleans())
def test_every_value_and_some_ticks_are_within_the_axis(values, log, from_zero):
    if log:
        values = [abs(value) + 1e-6 for value in values]
    axis = axis_for(values, 300.0, 10.0, log=log, from_zero=from_zero)
    assert all(10.0 - 1e-6 <= axis.place(value) <= 300.0 + 1e-6 for value in values)
    ticks = axis.ticks()
    assert len(ticks) <= 16
    assert all(axis.low - abs(axis.low) * 1e-9 <= tick <= axis.high + abs(axis.high) * 1e-9 for tick in ticks)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (5.43219, "5.432"),
        (12300, "12.3k"),
        (2.5e6, "2.5M"),
        (0.00021, "2.1e-4"),
        (-1500, "-1.5k"),
        (0.02, "0.02"),
        (1e-300, "1e-300"),
        (3e9, "3G"),
        (math.nan, "–"),
    ],
)
def test_short_numbers(value, text):
    assert short(value) == text


def test_short_curves_are_drawn_whole():
    assert thin([1, 2, 3], [1.0, math.nan, 3.0], 10) == [0, 1, 2]


def test_long_curves_keep_their_peaks_ends_and_gaps():
    values = [math.sin(place / 50) for place in range(100_000)]
    values[40_000], values[70_000], values[90_000] = 9.0, -9.0, math.nan
    kept = thin(range(100_000), values, 200)
    assert len(kept) <= 5 * 201
    assert {0, 40_000, 70_000, 90_000, 99_999} <= set(kept)
    assert kept == sorted(set(kept))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(NUMBERS, st.just(math.nan)), min_size=60, max_size=200), st.integers(1, 8))
def test_in_every_stretch_the_lowest_and_the_highest_stay(values, columns):
    updates = list(range(len(values)))
    kept = thin(updates, values, columns)
    finite = [place for place, value in enumerate(values) if math.isfinite(value)]
    if finite:
        shown = [values[place] for place in kept if math.isfinite(values[place])]
        assert (min(shown), max(shown)) == (min(values[p] for p in finite), max(values[p] for p in finite))
