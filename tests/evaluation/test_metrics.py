"""Metrics of SuperGLUE on cases that were computed by hand, and standard errors of which a formula is known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ftk.data.supervised.labelled import LabelledConfig
from ftk.evaluation.classification import metrics_of
from ftk.evaluation.metrics import (
    Metric,
    binary_f1,
    by_class,
    entities,
    macro_f1,
    matthews,
    measure,
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
        by_class("macro_f1", CB, macro_f1),
        [(CB[0], CB[0]), (CB[0], CB[0]), (CB[0], CB[1]), (CB[1], CB[1]), (CB[2], CB[0])],
        100 * (4 / 6 + 2 / 3 + 0) / 3,
    ),
    # A class that neither is chosen nor occurs is left out; one that is chosen alone counts as 0.
    ("macro_f1 absent", by_class("x", CB, macro_f1), [(CB[0], CB[0]), (CB[1], CB[1])], 100.0),
    ("macro_f1 chosen", by_class("x", CB, macro_f1), [(CB[0], CB[0]), (CB[0], CB[2])], 100 * (2 / 3 + 0) / 2),
    ("f1a", by_class("f1a", (0, 1), binary_f1), [(1, 1), (1, 0), (0, 1), (1, 1), (0, 0)], 100 * 4 / 6),
    ("f1a none", by_class("f1a", (0, 1), binary_f1), [(0, 0)], 0.0),
    # tp 3, tn 2, fp 1, fn 1
    (
        "mcc",
        by_class("mcc", (False, True), matthews),
        [(True, True)] * 3 + [(False, False)] * 2 + [(False, True), (True, False)],
        (3 * 2 - 1 * 1) / math.sqrt(4 * 4 * 3 * 3),
    ),
    # Gorodkin 2004: right 4 of 5; labels 2, 2, 1; choices 2, 1, 2.
    (
        "mcc of three",
        by_class("mcc", CB, matthews),
        [(CB[0], CB[0]), (CB[0], CB[0]), (CB[1], CB[1]), (CB[1], CB[2]), (CB[2], CB[2])],
        (4 * 5 - (2 * 2 + 2 * 1 + 1 * 2)) / math.sqrt((25 - 9) * (25 - 9)),
    ),
    ("mcc undefined", by_class("mcc", (False, True), matthews), [(True, True), (False, True)], 0.0),
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


def test_a_difference_is_drawn_in_pairs() -> None:
    generator = np.random.default_rng(0)
    rights = generator.random((2, 400)) < [[0.6], [0.55]]
    rights[1] = np.where(generator.random(400) < 0.9, rights[0], rights[1])  # most rows are hard for both or for none
    own, its = ([{"correct": bool(one)} for one in side] for side in rights)
    (found,) = measure([share("accuracy")], own, draws=2000, others=its).values()
    gained = 100.0 * (rights[0].astype(float) - rights[1])
    assert found.value == pytest.approx(gained.mean())
    assert found.standard_error == pytest.approx(gained.std() / math.sqrt(400), rel=0.06)
    alone = [measure([share("accuracy")], side)["accuracy"] for side in (own, its)]
    assert found.standard_error < 0.5 * math.hypot(*(float(one.standard_error or 0.0) for one in alone))
    rows = records([(1, 1), (1, 0), (0, 1), (1, 1), (0, 0)])
    (same,) = measure([by_class("f1", (0, 1), binary_f1)], rows, others=rows).values()
    assert (same.value, same.standard_error) == (0.0, 0.0)


def test_what_is_too_large_has_no_standard_error() -> None:
    largest = Metric("largest", lambda group: [group[0]["x"]], lambda sums: sums[0])
    found = measure([largest], [{"x": 1e200}, {"x": 1e180}, {"x": 1.0}])["largest"]
    assert (found.value, found.standard_error) == (pytest.approx(1e200), None)


def test_what_is_not_defined_is_none() -> None:
    nothing = Metric("x", lambda group: [0.0], lambda sums: math.nan)
    assert measure([nothing], records([(0, 0), (1, 1)]))["x"][:2] == (None, None)
    assert measure([share("accuracy")], [])["accuracy"][:2] == (None, None)
    assert measure([share("accuracy")], records([(0, 0)]))["accuracy"][:2] == (100.0, None)  # one row: no error
    assert measure([share("accuracy")], records([(0, 0), (0, 1)]), draws=0)["accuracy"].standard_error is None


def test_a_metric_of_all_records_has_no_standard_error() -> None:
    metric = Metric("count", over=lambda rows: float(len(rows)))
    assert measure([metric], records([(0, 0)] * 3))["count"][:2] == (3.0, None)


def test_counts_are_those_of_right_ones_labels_and_choices() -> None:
    counts = np.array([[2.0, 4.0], [3.0, 4.0], [2.0, 5.0]])  # one 0 was taken for a 1
    assert macro_f1(counts) == pytest.approx((2 * 2 / 5 + 2 * 4 / 9) / 2)
    assert binary_f1(counts) == pytest.approx(2 * 4 / 9)


NUMBERS = LabelledConfig(kind="regression")
TAGS = LabelledConfig(kind="token_labels", labels=["B-X", "B-Y", "I-X", "O"])


PAIRS = [(1.0, 10.0), (2.0, 10.0), (3.0, 30.0), (4.0, 20.0)]


def test_correlations_are_those_of_their_definitions() -> None:
    rows = records(PAIRS)
    found = measure(metrics_of(NUMBERS), rows)
    assert found["pearson"].value == pytest.approx(np.corrcoef([1, 2, 3, 4], [10, 10, 30, 20])[0, 1])
    assert found["spearman"].value == pytest.approx(np.corrcoef([1, 2, 3, 4], [1.5, 1.5, 4, 3])[0, 1])
    assert found["mse"].value == pytest.approx((81 + 64 + 27**2 + 256) / 4)
    late = measure(metrics_of(NUMBERS), records([(1.7e9 + label, chosen - 4e8) for label, chosen in PAIRS]), draws=9)
    assert late["pearson"] == measure(metrics_of(NUMBERS), records(PAIRS), draws=9)["pearson"]
    constant = measure(metrics_of(NUMBERS), records([(0.1 * n, 0.3) for n in range(9)]))
    assert (constant["pearson"].value, constant["spearman"].value) == (0.0, 0.0)


def test_entities_are_whole_and_a_stray_inside_begins_one() -> None:
    assert entities(["B-X", "I-X", "O", "I-Y", "I-X", "B-X"]) == {(0, 2, "X"), (3, 4, "Y"), (4, 5, "X"), (5, 6, "X")}
    assert entities(["O", None]) == set()
    rows = records(
        [
            (["B-X", "I-X", "O"], ["B-X", "I-X", "B-Y"]),  # one of two is right
            (["B-X", "I-X"], ["B-X", None]),  # too short; the second word was not read
        ]
    )
    found = measure(metrics_of(TAGS), rows)
    assert found["entity_f1"].value == pytest.approx(100 * 2 * 1 / (2 + 3))
    assert found["accuracy"].value == pytest.approx(100 * 3 / 5)
    f1 = [2 * 2 / 4, 0.0, 2 * 1 / 3, 0.0]  # of B-X, B-Y, I-X, O
    assert found["macro_f1"].value == pytest.approx(100 * sum(f1) / 4)


def test_drawings_with_one_label_say_nothing_of_a_correlation() -> None:
    """Half of the drawings from two rows hold one label, where the correlation is 0 by convention."""
    rows = [{"label": value, "chosen": value, "correct": True} for value in (True, False)]
    found = measure([by_class("mcc", (False, True), matthews)], rows, draws=50)["mcc"]
    assert (found.value, found.standard_error, found.percent) == (1.0, 0.0, False)
