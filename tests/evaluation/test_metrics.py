"""Metrics of SuperGLUE on cases that were computed by hand, and standard errors of which a formula is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ftk.evaluation.metrics import (
    Metric,
    binary_f1,
    macro_f1,
    matthews,
    measure,
    of_confusion,
    share,
    share_of_groups,
)


def records(pairs: list[tuple[Any, Any]], **more: Any) -> list[dict[str, Any]]:
    return [{"label": label, "chosen": chosen, "correct": label == chosen, **more} for label, chosen in pairs]


CB = ("entailment", "contradiction", "neutral")
CASES: list[tuple[str, Metric, list[tuple[Any, Any]], float]] = [
    ("accuracy", share("accuracy"), [(0, 0), (1, 0), (1, 1), (0, 1)], 50.0),
    # F1 of the classes: 2 * 2 / (3 + 3), 2 * 1 / (1 + 2), 0.
    (
        "macro_f1",
        of_confusion("macro_f1", CB, macro_f1),
        [(CB[0], CB[0]), (CB[0], CB[0]), (CB[0], CB[1]), (CB[1], CB[1]), (CB[2], CB[0])],
        100 * (4 / 6 + 2 / 3 + 0) / 3,
    ),
    # A class that neither is chosen nor occurs is left out; one that is chosen alone counts as 0.
    ("macro_f1 absent", of_confusion("x", CB, macro_f1), [(CB[0], CB[0]), (CB[1], CB[1])], 100.0),
    ("macro_f1 chosen", of_confusion("x", CB, macro_f1), [(CB[0], CB[0]), (CB[0], CB[2])], 100 * (2 / 3 + 0) / 2),
    ("f1a", of_confusion("f1a", (0, 1), binary_f1), [(1, 1), (1, 0), (0, 1), (1, 1), (0, 0)], 100 * 4 / 6),
    ("f1a none", of_confusion("f1a", (0, 1), binary_f1), [(0, 0)], 0.0),
    # tp 3, tn 2, fp 1, fn 1
    (
        "mcc",
        of_confusion("mcc", (False, True), matthews),
        [(True, True)] * 3 + [(False, False)] * 2 + [(False, True), (True, False)],
        100 * (3 * 2 - 1 * 1) / math.sqrt(4 * 4 * 3 * 3),
    ),
    ("mcc undefined", of_confusion("mcc", (False, True), matthews), [(True, True), (False, True)], 0.0),
]


@pytest.mark.parametrize(("name", "metric", "pairs", "expected"), CASES, ids=[case[0] for case in CASES])
def test_metrics_of_hand_computed_cases(name: str, metric: Metric, pairs: Any, expected: float) -> None:
    (found,) = measure([metric], records(pairs)).values()
    assert found.value == pytest.approx(expected)


def test_exact_match_of_multirc_counts_questions_all_of_whose_answers_are_right() -> None:
    rows = [
        {"place": place, "question": question, "correct": correct}
        for place, question, correct in [
            ("p1", "q1", True),
            ("p1", "q1", True),
            ("p1", "q2", True),
            ("p1", "q2", False),
            ("p2", "q3", True),
        ]
    ]
    metric = share_of_groups("em", lambda record: record["question"])
    found = measure([metric], rows, lambda record: record["place"])
    assert found["em"].value == pytest.approx(100 * 2 / 3)


def test_the_standard_error_of_a_share_is_the_known_one() -> None:
    rows = records([(0, int(number < 20)) for number in range(100)])
    found = measure([share("accuracy")], rows, draws=4000)["accuracy"]
    assert found.value == 80.0
    assert found.standard_error == pytest.approx(math.sqrt(0.8 * 0.2 / 100) * 100, rel=0.05)
    again = measure([share("accuracy")], rows, draws=4000)["accuracy"]
    assert again == found
    assert measure([share("accuracy")], rows, draws=4000, seed=2)["accuracy"] != found


def test_groups_are_drawn_as_a_whole() -> None:
    """Ten copies of each row say no more than one: the standard error is that of the groups."""
    rows = [{**record, "place": number} for number, record in enumerate(records([(0, n % 2) for n in range(40)]))]
    alone = measure([share("accuracy")], rows, lambda record: record["place"])["accuracy"]
    copied = measure([share("accuracy")], rows * 10, lambda record: record["place"])["accuracy"]
    assert copied.standard_error == pytest.approx(alone.standard_error)
    assert measure([share("accuracy")], rows * 10)["accuracy"].standard_error < alone.standard_error / 2


def test_what_is_not_defined_is_none() -> None:
    nothing = Metric("x", lambda group: [0.0], lambda sums: math.nan)
    assert measure([nothing], records([(0, 0), (1, 1)]))["x"][:2] == (None, None)
    assert measure([share("accuracy")], [])["accuracy"][:2] == (None, None)
    assert measure([share("accuracy")], records([(0, 0)]))["accuracy"][:2] == (100.0, None)  # one row: no error
    assert measure([share("accuracy")], records([(0, 0), (0, 1)]), draws=0)["accuracy"].standard_error is None


def test_a_metric_of_all_records_has_no_standard_error() -> None:
    metric = Metric("count", over=lambda rows: float(len(rows)))
    assert measure([metric], records([(0, 0)] * 3))["count"][:2] == (3.0, None)


def test_counts_are_those_of_rows_and_columns() -> None:
    counts = np.array([[2.0, 1.0], [0.0, 4.0]])  # one 0 was taken for a 1
    assert macro_f1(counts) == pytest.approx((2 * 2 / 5 + 2 * 4 / 9) / 2)
    assert binary_f1(counts) == pytest.approx(2 * 4 / 9)
