"""Metrics over records, with standard errors: a metric is a function of sums to which each group of records adds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Record = dict[str, Any]
"""What was asked and found for one row, as JSON holds it."""

Group = Sequence[Mapping[str, Any]]
"""Records that belong together: those of one passage, or one alone."""


class Metric(NamedTuple):
    """A number over records.

    Attributes:
        name: as it is printed.
        add: what a group of records adds to the sums.
        value: the metric of the sums, float64 [k]; NaN where it is not defined.
        percent: whether it is a share in percent.
        over: the metric of all records, where it is no function of sums; it then has no standard error.
    """

    name: str
    add: Callable[[Group], Sequence[float]] = lambda group: []
    value: Callable[[NDArray[np.float64]], float] = lambda sums: math.nan
    percent: bool = True
    over: Callable[[Group], float] | None = None


class Measured(NamedTuple):
    """The value of a metric.

    Attributes:
        value: over all records; None where it is not defined.
        standard_error: of the value; None where there are fewer than two groups, or none is drawn.
        percent: as of `Metric`.
    """

    value: float | None
    standard_error: float | None
    percent: bool


def measure(
    metrics: Sequence[Metric],
    records: Sequence[Mapping[str, Any]],
    group: Callable[[Mapping[str, Any]], Hashable] | None = None,
    *,
    draws: int = 1000,
    seed: int = 1,
) -> dict[str, Measured]:
    """The values of metrics by name, with standard errors by the bootstrap (Efron 1979).

    As many groups as there are, drawn with replacement, give another value; the standard error is the standard
    deviation of the values of `draws` such drawings.

    Args:
        metrics: what is computed.
        records: of all rows.
        group: what the records of one group have in common; None: each is a group by itself.
        draws: 0: no standard errors.
        seed: of the drawings.
    """
    groups: dict[Hashable, list[Mapping[str, Any]]] = {}
    for number, record in enumerate(records):
        groups.setdefault(number if group is None else group(record), []).append(record)
    found = {}
    for metric in metrics:
        value = error = math.nan
        if metric.over is not None:
            value = metric.over(records)
        elif groups:
            added = np.array([metric.add(own) for own in groups.values()], dtype=np.float64)  # [groups, k]
            value = metric.value(added.sum(axis=0))
            if draws > 0 and len(added) > 1:
                error = _standard_error(metric, added, draws, seed)
        found[metric.name] = Measured(_finite(value), _finite(error), metric.percent)
    return found


def _standard_error(metric: Metric, added: NDArray[np.float64], draws: int, seed: int) -> float:
    random, count = np.random.default_rng(seed), len(added)
    values = []
    for _ in range(draws):
        times = np.bincount(random.integers(0, count, count), minlength=count)
        value = metric.value(times @ added)
        if np.isfinite(value):  # not defined for this drawing: e.g. it holds no record of a class
            values.append(value)
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def share(name: str, key: str = "correct") -> Metric:
    """Records that a field is true of, in percent; of numbers their mean times 100."""

    def add(group: Group) -> list[float]:
        return [sum(float(record[key]) for record in group), len(group)]

    return Metric(name, add, _mean)


def share_of_groups(name: str, part: Callable[[Mapping[str, Any]], Hashable], key: str = "correct") -> Metric:
    """Parts of groups all of whose records a field is true of, in percent: MultiRC's exact match of questions.

    Args:
        part: what the records of one part have in common.
    """

    def add(group: Group) -> list[float]:
        parts: dict[Hashable, bool] = {}
        for record in group:
            parts[part(record)] = parts.get(part(record), True) and bool(record[key])
        return [sum(parts.values()), len(parts)]

    return Metric(name, add, _mean)


def of_confusion(name: str, classes: Sequence[Any], value: Callable[[NDArray[np.float64]], float]) -> Metric:
    """A function of how often each class was chosen for each label; records have them as `chosen` and `label`.

    Args:
        classes: K values.
        value: of the counts float64 [K, K], rows labels, columns choices: `macro_f1`, `binary_f1`, `matthews`.
    """

    number = {value: place for place, value in enumerate(classes)}

    def add(group: Group) -> list[float]:
        counts = np.zeros((len(classes), len(classes)))
        for record in group:
            counts[number[record["label"]], number[record["chosen"]]] += 1
        return counts.flatten().tolist()

    return Metric(name, add, lambda sums: 100.0 * value(sums.reshape(len(classes), len(classes))))


def macro_f1(counts: NDArray[np.float64]) -> float:
    """Mean F1 of the classes that occur, as labels or as choices (SuperGLUE's rule for CB, that of scikit-learn).

    Args:
        counts: [K, K], see `of_confusion`.
    """
    both = counts.sum(axis=0) + counts.sum(axis=1)  # [K]
    occur = both > 0
    return float(np.mean(2 * counts.diagonal()[occur] / both[occur])) if occur.any() else math.nan


def binary_f1(counts: NDArray[np.float64]) -> float:
    """F1 of class 1 (MultiRC's F1a over all options; Khashabi et al. 2018); 0 where it never occurs.

    Args:
        counts: [2, 2], see `of_confusion`.
    """
    both = counts[1].sum() + counts[:, 1].sum()
    return float(2 * counts[1, 1] / both) if both > 0 else 0.0


def matthews(counts: NDArray[np.float64]) -> float:
    """Correlation of labels and choices (Matthews 1975); 0 where it is not defined.

    Args:
        counts: [2, 2], see `of_confusion`.
    """
    (tn, fp), (fn, tp) = counts
    product = (tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)
    return float((tp * tn - fp * fn) / np.sqrt(product)) if product > 0 else 0.0


def _mean(sums: NDArray[np.float64]) -> float:
    return float(100.0 * sums[0] / sums[1]) if sums[1] else math.nan
