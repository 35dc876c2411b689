"""Results of evaluations: as a table, as files that recompute to the printed numbers, and their surest mistakes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ftk.errors import UserError, counted
from ftk.evaluation.breakdown import Breakdown
from ftk.evaluation.metrics import Measured, Record
from ftk.files import as_user_error, put_in_place, sync_tree, temporary_folder
from ftk.terminal import in_columns

RESULTS, PREDICTIONS, SUBMISSION = FILES = ("results.json", "predictions.jsonl", "submission")
"""What a folder of results holds; the last is a folder of files to hand in."""

_LARGE = 1e6  # numbers from it on are shown with an exponent
_LONGEST_PROMPT = 300  # characters of a mistake's prompt that are shown, from its end


class Result(NamedTuple):
    """What an evaluation of a file found.

    Attributes:
        name: of the evaluation.
        line: as it was asked for, with its options.
        settings: what the numbers depend on.
        records: in the order of the file.
        measured: metrics by name.
        breakdown: the same by label and length.
        more: how much larger each metric is than another model's; empty: none was compared.
    """

    name: str
    line: str
    data: str
    settings: Mapping[str, Any]
    records: Sequence[Record]
    measured: Mapping[str, Measured]
    breakdown: Breakdown = Breakdown()
    more: Mapping[str, Measured] = MappingProxyType({})

    @property
    def num_truncated(self) -> int:
        """Records whose text was cut."""
        return sum(bool(record.get("truncated")) for record in self.records)

    def as_json(self) -> dict[str, Any]:
        """An entry of the file of results; without records."""
        num_counted = len(labelled(self.records))
        return {
            "evaluation": self.name,
            "line": self.line,
            "data": self.data,
            "settings": dict(self.settings),
            "n": num_counted,
            "unlabelled": len(self.records) - num_counted,
            "truncated": self.num_truncated,
            "metrics": _as_json(self.measured),
            "more": _as_json(self.more),
            "confusion": {"labels": [*self.breakdown.classes], "counts": [*map(list, self.breakdown.confusion)]},
            "parts": [
                {"part": part.name, "n": part.num_records, "metrics": _as_json(part.measured)}
                for part in self.breakdown.parts
            ],
        }


def _as_json(measured: Mapping[str, Measured]) -> dict[str, Any]:
    return {
        name: {"value": metric.value, "standard_error": metric.standard_error, "unit": "%" if metric.percent else ""}
        for name, metric in measured.items()
    }


def labelled(records: Sequence[Record]) -> list[Record]:
    """Those that count: a row without a label has `label` None; where nothing is chosen, there is no `label`."""
    return [record for record in records if record.get("label", True) is not None]


def table(results: Sequence[Result]) -> list[str]:
    """Lines with one metric each; of a result the first says what it is of."""
    compared = any(result.more for result in results)
    more = ("difference", "standard error") if compared else ()
    rows: list[tuple[str, ...]] = [("evaluation", "data", "n", "metric", "value", "standard error", *more)]
    for result in results:
        num_counted = len(labelled(result.records))
        others = len(result.records) - num_counted
        number = f"{num_counted:,}" + (f" + {others:,} unlabelled" if others else "")
        first = (result.line, Path(result.data).name, number)
        if compared:
            rows += _metric_rows(first, result.measured, result.more)
        else:
            rows += _metric_rows(first, result.measured)
        if not result.measured:
            rows.append((*first, "no metrics" if num_counted else "no labels", "", "", *("" for _ in more)))
    return in_columns(rows, left=(0, 1, 3))


def notes(result: Result) -> Iterator[str]:
    """Lines about what the model did not read."""
    count = len(result.records)
    asked = int(result.settings.get("num_fewshot") or 0) * count
    shown = sum(len(record.get("examples", ())) for record in result.records)
    if shown < asked:
        yield f"{result.line}: {shown:,} of {asked:,} examples had room in front of their questions"
    if result.num_truncated:
        yield f"{result.line}: {result.num_truncated:,} of {counted(count, 'text', ',')} did not fit whole"


def details(result: Result) -> Iterator[str]:
    """Lines with how often each label is taken for each other, and with the metrics by label and by length."""
    classes, confusion, parts = result.breakdown
    where = f"{result.line}, {Path(result.data).name}"
    if classes:
        yield f"{where}: rows are labels, columns are choices"
        rows: list[tuple[str, ...]] = [("", *map(str, classes))]
        rows += [(str(label), *map(str, counts)) for label, counts in zip(classes, confusion, strict=True)]
        yield from (f"  {line}" for line in in_columns(rows))
    if parts:
        lines: list[tuple[str, ...]] = [(where, "n", "metric", "value", "standard error")]
        for part in parts:
            lines += _metric_rows((f"  {part.name}", f"{part.num_records:,}"), part.measured)
        yield from in_columns(lines, left=(0, 2))


def _metric_rows(first: tuple[str, ...], *sides: Mapping[str, Measured]) -> Iterator[tuple[str, ...]]:
    """A row for each metric, with value and error of each side; `first` stands in front of the first one."""
    for name in sides[0]:
        found = [side.get(name, Measured(None, None, True)) for side in sides]
        numbers = [(part, " %" if own.percent else "") for own in found for part in (own.value, own.standard_error)]
        yield (*first, name, *(_number(*number) for number in numbers))
        first = ("",) * len(first)


def mistakes(result: Result, count: int) -> Iterator[str]:
    """Lines about the mistakes that the model was surest of, the surest first."""
    wrong = [record for record in result.records if record.get("correct") is False]
    wrong.sort(key=lambda record: record["confidence"], reverse=True)
    number = counted(len(wrong), "mistake", ",")
    yield f"{result.line}, {Path(result.data).name}: {number}" + (", the surest first" if len(wrong) > 1 else "")
    for record in wrong[:count]:
        prompt = " ".join(str(record["prompt"]).split())
        shown = prompt if len(prompt) <= _LONGEST_PROMPT else f"... {prompt[-_LONGEST_PROMPT:]}"
        yield f"  {record['place']}  confidence {record['confidence']:.2f} nats"
        yield f"    {shown}"
        texts = {repr(candidate.get("label")): candidate["text"].strip() for candidate in record.get("candidates", ())}
        labels = [repr(record[name]) for name in ("label", "chosen")]
        expected, chosen = (
            f"{label} ({texts[label]!r})" if texts.get(label, label) != label else label for label in labels
        )
        yield f"    expected {expected}, chosen {chosen}"


def check_output(folder: Path, overwrite: bool) -> None:
    """Refuses a folder that cannot be written, or whose replacement could lose files of others.

    Raises:
        UserError: it is a file; it is not empty and `overwrite` is off; it holds other files than results.
    """
    name = f"`output` {folder}"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{name}: is no folder; choose another name")
    if not folder.exists():
        if not folder.absolute().parent.is_dir():
            raise UserError(f"{name}: there is no folder {folder.absolute().parent}; make it first")
        return
    found = sorted(path.name for path in folder.iterdir())
    if found and not overwrite:
        raise UserError(f"{name}: exists already; choose another, or replace it with `overwrite`")
    others = [file for file in found if file not in FILES]
    if others:
        raise UserError(f"{name}: holds what ftk did not write ({', '.join(others[:3])}); choose another folder")


def write_results(
    folder: Path,
    facts: Mapping[str, Any],
    results: Sequence[Result],
    overwrite: bool,
    submissions: Mapping[str, str],
) -> None:
    """Writes `results.json` and `predictions.jsonl` into a folder, which appears whole or not at all.

    Args:
        folder: see `check_output`.
        facts: about model, data and versions, which stand above the results.
        overwrite: as of `check_output`.
        submissions: name -> text of files to hand in, which a folder in it holds.

    Raises:
        UserError: it cannot be written.
    """
    check_output(folder, overwrite)
    content = {**facts, "results": [result.as_json() for result in results]}
    with as_user_error(f"`output` {folder}"), temporary_folder(folder.absolute()) as made:
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (made / RESULTS).write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
        with open(made / PREDICTIONS, "w", encoding="utf-8", errors="backslashreplace") as file:
            for result in results:
                where = {"evaluation": result.line, "data": result.data}
                for record in result.records:
                    file.write(json.dumps({**where, **record}, ensure_ascii=False) + "\n")
        for name, submission in submissions.items():
            (made / SUBMISSION).mkdir(exist_ok=True)
            (made / SUBMISSION / name).write_text(submission, encoding="utf-8", errors="backslashreplace")
        sync_tree(made)
        put_in_place(made, folder.absolute())


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if abs(value) >= _LARGE:
        return f"{value:.3g}{unit}".replace("e+", "e")
    return f"{value:.2f}{unit}" if unit else f"{value:,.4f}"
