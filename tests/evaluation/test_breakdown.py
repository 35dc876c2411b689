"""Which label is taken for which, and metrics by label and by length."""

from __future__ import annotations

from typing import Any

from ftk.evaluation.breakdown import break_down
from ftk.evaluation.metrics import share
from ftk.evaluation.results import Result, details, table

MADE = [(True, True, 20), (True, False, 31), (False, False, 32), (True, True, 63), (False, False, 64)]


def of(classes: list[Any]) -> Any:
    records = [
        {"place": number, "label": label, "chosen": chosen, "correct": label == chosen, "length": length}
        for number, (label, chosen, length) in enumerate(MADE)
    ]
    return break_down(records, classes, [share("accuracy")], lambda record: record["place"], draws=20, seed=1)


def test_records_are_counted_by_label_and_by_length() -> None:
    found = of([False, True])
    assert found.confusion == [[2, 0], [1, 2]]
    values = {part.name: (part.num_records, part.measured["accuracy"].value) for part in found.parts}
    assert values == {
        "label False": (2, 100.0),
        "label True": (3, 200 / 3),
        "16 to 31 tokens": (2, 50.0),
        "32 to 63 tokens": (2, 100.0),
        "64 to 127 tokens": (1, 100.0),
    }
    assert {part.name: part.measured["accuracy"].standard_error is None for part in found.parts} == {
        name: name == "64 to 127 tokens" for name in values
    }
    without = of([])
    assert (without.confusion, [part.name for part in without.parts]) == ([], [*values][2:])


def test_what_is_no_class_is_counted_in_no_cell() -> None:
    records = [
        {"place": place, "label": "yes", "chosen": chosen, "correct": chosen == "yes"}
        for place, chosen in enumerate(("yes", None))
    ]
    found = break_down(records, ["yes"], [], lambda record: record["place"], draws=0, seed=1)
    assert found.confusion == [[1]]


def test_they_are_printed_as_tables() -> None:
    lines = [*details(Result("boolq", "boolq pattern=1", "/x/val.jsonl", {}, [], {}, of([False, True])))]
    assert lines[:4] == [
        "boolq pattern=1, val.jsonl: rows are labels, columns are choices",
        "         False  True",
        "  False      2     0",
        "  True       1     2",
    ]
    assert lines[4].split() == ["boolq", "pattern=1,", "val.jsonl", "n", "metric", "value", "standard", "error"]
    assert [line.split()[:4] for line in lines[5:7]] == [
        ["label", "False", "2", "accuracy"],
        ["label", "True", "3", "accuracy"],
    ]
    assert len(lines) == 10


def test_a_result_without_a_figure_says_whether_it_lacks_labels_or_metrics() -> None:
    for label, what in ((None, "no labels"), ("yes", "no metrics")):
        result = Result("mine", "mine", "rows.jsonl", settings={}, records=[{"label": label}], measured={})
        assert what in table([result])[-1]
