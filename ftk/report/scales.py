"""From numbers to places on a chart: axes, ticks, numbers as text, and long curves thinned out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Axis:
    """A stretch of numbers laid over a stretch of pixels.

    Args:
        low, high: numbers at the ends, low below high; both above 0 for `log`.
        start, end: their pixels.
        log: whether equal ratios, instead of equal differences, are equally far apart.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        """The pixel of a number."""
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(value) if self.log else value
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within the axis, about five."""
        return _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)


def axis_for(values: Sequence[float], start: float, end: float, *, log: bool = False, from_zero: bool = False) -> Axis:
    """The axis that holds all values, with some room at both ends.

    Args:
        values: finite; above 0 for `log`. May be empty.
        start, end: pixels.
        log: as of `Axis`.
        from_zero: whether a linear axis begins at 0, if nothing is below it.
    """
    low, high = (min(values), max(values)) if values else (1.0, 1.0)
    if log:
        room = (high / low) ** 0.04 if high > low * 1.001 else 1.1
        return Axis(low / room, high * room, start, end, log=True)
    span = high - low if high - low > 1e-9 * max(abs(high), abs(low)) else max(abs(high) * 0.1, 1e-9)
    bottom = 0.0 if from_zero and low >= 0.0 else low - 0.04 * span
    return Axis(bottom, high + 0.04 * span, start, end)


def thin(updates: Sequence[float], values: Sequence[float], columns: int) -> list[int]:
    """Which points to draw so that the curve looks as if all were drawn.

    The updates are cut into `columns` stretches; of each the first, last, lowest and highest point and one gap (NaN)
    stay. Returns rising places.
    """
    if len(values) <= 4 * columns:
        return list(range(len(values)))
    low, high = min(updates), max(updates)
    scale = columns / (high - low) if high > low else 0.0
    kept: set[int] = set()
    begin = 0
    while begin < len(values):
        column = int((updates[begin] - low) * scale)
        end = begin + 1
        while end < len(values) and int((updates[end] - low) * scale) == column:
            end += 1
        numbers = [place for place in range(begin, end) if math.isfinite(values[place])]
        kept |= {begin, end - 1}
        if numbers:
            kept |= {min(numbers, key=values.__getitem__), max(numbers, key=values.__getitem__)}
        if len(numbers) < end - begin:
            kept.add(next(place for place in range(begin, end) if not math.isfinite(values[place])))
        begin = end
    return sorted(kept)


def short(value: float) -> str:
    """A number in few characters: 12300 -> 12.3k, 0.00021 -> 2.1e-4."""
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{value / limit:.3g}{letter}"
    if size == 0.0 or size >= 0.01:
        return f"{value:.4g}"
    digits, exponent = f"{value:.2e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / 5
    base = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * base for factor in (1, 2, 2.5, 5, 10) if factor * base >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    # Rounded to the step's own digits, so that 0.1 * 3 is 0.3.
    digits = max(0, 2 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if last - first > 12:
        exponents = range(first, last + 1, (last - first) // 6)
        return [10.0**exponent for exponent in exponents if low <= 10.0**exponent <= high]
    for factors in ((1,), (1, 3), (1, 2, 5)):
        ticks = [factor * 10.0**exponent for exponent in range(first, last + 1) for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 4:
            return ticks
    return ticks if len(ticks) >= 3 else [tick for tick in _ticks(low, high) if tick > 0]
