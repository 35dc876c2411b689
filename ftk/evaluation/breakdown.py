"""Where a model fails: which label it takes for which, and its metrics by label and by length."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from ftk.evaluation.metrics import Measured, Metric, Record, measure, share


class Part(NamedTuple):
    """Records that have something in common.

    Attributes:
        name: what, for people: `label True`, `64 to 127 tokens`.
        num_records: how many there are.
        measured: metrics by name.
    """

    name: str
    num_records: int
    measured: Mapping[str, Measured]


class Breakdown(NamedTuple):
    """The records of one evaluation by what they are.

    Attributes:
        classes: K labels; empty where labels are texts, or there are none.
        confusion: [K][K], how often each class was chosen for each label; rows labels, columns choices,
            without records that have another.
        parts: by label, then by length.
    """

    classes: Sequence[Any] = ()
    confusion: Sequence[Sequence[int]] = ()
    parts: Sequence[Part] = ()


def break_down(
    records: Sequence[Record],
    classes: Sequence[Any],
    metrics: Sequence[Metric],
    group: Callable[[Mapping[str, Any]], Hashable],
    *,
    draws: int,
    seed: int,
) -> Breakdown:
    """Records by label, and by the number of their tokens between powers of two.

    Args:
        records: those with a label.
        classes: the labels that there are; empty: no counts by label.
        metrics: of each length; by label the share of right answers is counted, since others compare labels.
        group, draws, seed: as of `ftk.evaluation.metrics.measure`.
    """
    by_name: dict[str, tuple[Sequence[Metric], list[Record]]] = {
        f"label {label}": ((share("accuracy"),), [record for record in records if record["label"] == label])
        for label in classes
    }
    for record in sorted((record for record in records if record.get("length")), key=lambda record: record["length"]):
        least = 1 << (record["length"].bit_length() - 1)
        by_name.setdefault(f"{least} to {2 * least - 1} tokens", (metrics, []))[1].append(record)
    number = {label: place for place, label in enumerate(classes)}
    confusion = [[0] * len(classes) for _ in classes]
    if classes:
        for record in records:
            if record["label"] in number and record["chosen"] in number:  # an only candidate may not be chosen
                confusion[number[record["label"]]][number[record["chosen"]]] += 1
    parts = [
        Part(name, len(own), measure(of_part, own, group, draws=draws, seed=seed))
        for name, (of_part, own) in by_name.items()
        if own
    ]
    return Breakdown(classes, confusion, parts)
