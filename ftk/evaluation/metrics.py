"""Metrics over records, with standard errors: a metric is a function of sums to which each group of records adds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Record = dict[str, Any]
"""What was asked and found for one row, as JSON holds it."""

Group = Sequence[Mapping[str, Any]]
"""Records that belong together: those of one passage, or one alone."""

_ROUNDING = 1e-12  # of a difference of sums, relative to the sums


class Metric(NamedTuple):
    """A number over records.

    Attributes:
        name: as it is printed.
        add: what a group of records adds to the sums.
        value: the metric of the sums, float64 [k]; NaN where it is not defined.
        percent: whether it is a share in percent.
        over: the metric of all records, where it is no function of sums; it then has no standard error.
        adding: makes `add` of all records, where sums depend on their range.
        counts: whether the sums of a drawing count for the standard error; None: where the value is finite.
    """

    name: str
    add: Callable[[Group], Sequence[float]] = lambda group: []
    value: Callable[[NDArray[np.float64]], float] = lambda sums: math.nan
    percent: bool = True
    over: Callable[[Group], float] | None = None
    adding: Callable[[Group], Callable[[Group], Sequence[float]]] | None = None
    counts: Callable[[NDArray[np.float64]], bool] | None = None


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
    others: Sequence[Mapping[str, Any]] | None = None,
) -> dict[str, Measured]:
    """The values of metrics by name, with standard errors by the bootstrap (Efron 1979).

    As many groups as there are, drawn with replacement, give another value; the standard error is the standard
    deviation of the values of `draws` such drawings.

    Args:
        records: of all rows.
        group: what the records of one group have in common; None: each is a group by itself.
        draws: 0: no standard errors.
        others: records of as many groups, in the same order, by another model: values are then how much larger the
            metrics of `records` are, and a drawing takes the same groups of both (Koehn 2004, "Statistical significance
            tests for machine translation evaluation").
    """
    sides = [records] if others is None else [records, others]
    grouped = [in_groups(side, group) for side in sides]
    found = {}
    for metric in metrics:
        value = error = math.nan
        if metric.over is not None:
            value = _difference(map(metric.over, sides))
        elif grouped[0]:
            add = metric.add if metric.adding is None else metric.adding([*itertools.chain(*sides)])
            added = np.array([[add(own) for own in side] for side in grouped], dtype=np.float64)  # [sides, groups, k]
            value = _difference(map(metric.value, added.sum(axis=1)))
            if draws > 0 and added.shape[1] > 1:
                error = _standard_error(metric, added, draws, seed)
        found[metric.name] = Measured(_finite(value), _finite(error), metric.percent)
    return found


def in_groups(
    records: Sequence[Mapping[str, Any]], group: Callable[[Mapping[str, Any]], Hashable] | None
) -> list[list[Mapping[str, Any]]]:
    """Records of one group together, as for `measure`, in the order in which groups begin."""
    groups: dict[Hashable, list[Mapping[str, Any]]] = {}
    for number, record in enumerate(records):
        groups.setdefault(number if group is None else group(record), []).append(record)
    return [*groups.values()]


def _difference(values: Iterable[float]) -> float:
    """The first value, less the second, if there is one."""
    first, *others = values
    return first - sum(others)


def _standard_error(metric: Metric, added: NDArray[np.float64], draws: int, seed: int) -> float:
    random, count = np.random.default_rng(seed), added.shape[1]
    values = []
    for _ in range(draws):
        times = np.bincount(random.integers(0, count, count), minlength=count)
        sums = times @ added  # [sides, k]
        value = _difference(map(metric.value, sums))
        # Not defined for other drawings: e.g. they hold no record of a class.
        if np.isfinite(value) and (metric.counts is None or all(map(metric.counts, sums))):
            values.append(value)
    with np.errstate(over="ignore"):  # the squares of perplexities of a model that knows nothing
        return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def share(name: str, key: str = "correct") -> Metric:
    """Records that a field is true of, in percent; of numbers their mean times 100."""

    def add(group: Group) -> list[float]:
        return [sum(float(record[key]) for record in group), len(group)]

    return Metric(name, add, _mean)


def share_of_groups(name: str, part: Callable[[Mapping[str, Any]], Hashable]) -> Metric:
    """Parts of groups all of whose records are correct, in percent: MultiRC's exact match of questions.

    Args:
        part: what the records of one part have in common.
    """

    def add(group: Group) -> list[float]:
        parts: dict[Hashable, bool] = {}
        for record in group:
            parts[part(record)] = parts.get(part(record), True) and bool(record["correct"])
        return [sum(parts.values()), len(parts)]

    return Metric(name, add, _mean)


def by_class(name: str, classes: Sequence[Any], value: Callable[[NDArray[np.float64]], float]) -> Metric:
    """A function of how often each class is right, a label, and chosen; records have `chosen` and `label`.

    Args:
        classes: K values; of what else was chosen the label counts alone.
        value: of the counts float64 [3, K]: `macro_f1`, `binary_f1`, `matthews`.
    """
    number = {value: place for place, value in enumerate(classes)}

    def add(group: Group) -> list[float]:
        counts = np.zeros((3, len(classes)))
        for record in group:
            label, chosen = number[record["label"]], number.get(record["chosen"])
            counts[1, label] += 1
            if chosen is not None:
                counts[2, chosen] += 1
                counts[0, label] += chosen == label
        return counts.flatten().tolist()

    def has_two_labels(sums: NDArray[np.float64]) -> bool:
        return bool(np.count_nonzero(sums.reshape(3, len(classes))[1]) > 1)

    if value is matthews:  # no share, but a correlation: 0 by convention where all labels are one, which tells nothing
        return Metric(name, add, lambda sums: matthews(sums.reshape(3, len(classes))), False, counts=has_two_labels)
    return Metric(name, add, lambda sums: 100.0 * value(sums.reshape(3, len(classes))))


def macro_f1(counts: NDArray[np.float64]) -> float:
    """Mean F1 of the classes that occur, as labels or as choices (SuperGLUE's rule for CB, that of scikit-learn).

    Args:
        counts: [3, K], see `by_class`.
    """
    right, labels, chosen = counts
    occur = labels + chosen > 0  # [K]
    return float(np.mean(2 * right[occur] / (labels + chosen)[occur])) if occur.any() else math.nan


def binary_f1(counts: NDArray[np.float64]) -> float:
    """F1 of class 1 (MultiRC's F1a over all options; Khashabi et al. 2018); 0 where it never occurs.

    Args:
        counts: [3, 2], see `by_class`.
    """
    right, labels, chosen = counts[:, 1]
    return float(2 * right / (labels + chosen)) if labels + chosen > 0 else 0.0


def matthews(counts: NDArray[np.float64]) -> float:
    """Correlation of labels and choices (Matthews 1975; of several classes Gorodkin 2004); 0 where it is not defined.

    Args:
        counts: [3, K], see `by_class`.
    """
    right, labels, chosen = counts
    total = labels.sum()
    product = (total**2 - labels @ labels) * (total**2 - chosen @ chosen)
    return float((right.sum() * total - labels @ chosen) / np.sqrt(product)) if product > 0 else 0.0


def pearson(sums: NDArray[np.float64]) -> float:
    """Linear correlation of labels x and choices y; 0 where one of them is always the same.

    Args:
        sums: [6], of 1, x, y, x x, y y, x y.
    """
    count, x, y, xx, yy, xy = sums
    spread_x, spread_y = count * xx - x * x, count * yy - y * y
    if spread_x <= _ROUNDING * count * xx or spread_y <= _ROUNDING * count * yy:
        return 0.0
    return float((count * xy - x * y) / np.sqrt(spread_x * spread_y))


def moments(records: Group) -> Callable[[Group], list[float]]:
    """What groups of records with numbers as `label` and `chosen` add to the sums of `pearson`.

    Numbers are taken from the medians of all: of large ones that differ by little the sums of squares would lose that.
    """

    def pairs(group: Group) -> NDArray[np.float64]:
        return np.array([(record["label"], record["chosen"]) for record in group], dtype=np.float64)  # [n, 2]

    middle = np.median(pairs(records), axis=0)  # [2]

    def add(group: Group) -> list[float]:
        x, y = (pairs(group) - middle).T
        return [float(len(group)), x.sum(), y.sum(), x @ x, y @ y, x @ y]

    return add


def spearman(group: Group) -> float:
    """`pearson` of the ranks of labels and choices; those that are equal have the mean of theirs (Spearman 1904)."""
    ranks = [_ranks([float(record[name]) for record in group]) for name in ("label", "chosen")]
    ranked = [{"label": x, "chosen": y} for x, y in zip(*ranks, strict=True)]
    return pearson(np.array(moments(ranked)(ranked)))


def entities(labels: Sequence[str | None]) -> set[tuple[int, int, str]]:
    """First word, end and kind of the entities that B-KIND and I-KIND name; an I that continues none begins one, as in
    conlleval (Tjong Kim Sang and De Meulder 2003)."""
    found: set[tuple[int, int, str]] = set()
    start, kind = 0, ""
    for place, label in enumerate((*labels, "O")):
        mark, _, own = (label or "O").partition("-")
        if kind and (mark, own) != ("I", kind):
            found.add((start, place, kind))
            kind = ""
        if mark in ("B", "I") and not kind:
            start, kind = place, own
    return found


def entity_counts(group: Group) -> list[float]:
    """Entities that are right, those of the labels, and those that were chosen."""
    pairs = [(entities(record["label"]), entities(record["chosen"])) for record in group]
    return [float(sum(sizes)) for sizes in zip(*((len(a & b), len(a), len(b)) for a, b in pairs), strict=True)]


def _ranks(values: Sequence[float]) -> NDArray[np.float64]:
    """The ranks of numbers, [n]; equal ones have the mean of theirs."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return ((ends - counts + ends - 1) / 2)[places]


def _mean(sums: NDArray[np.float64]) -> float:
    return float(100.0 * sums[0] / sums[1]) if sums[1] else math.nan
