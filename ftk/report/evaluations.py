"""Results of ftk-evaluate for several models, side by side on one HTML page. Nothing in the files is trusted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from ftk.errors import UserError, counted
from ftk.files import as_user_error, read_json
from ftk.report.page import comparison_table, fill_template, source_line, value_text
from ftk.report.runs import flat
from ftk.report.tables import name_cell

RESULTS = "results.json"
"""What ftk-evaluate writes (`ftk.evaluation.results`)."""


_SHA256 = "data_sha256."  # before a file's path, in a name of `Evaluated.facts`


class Key(NamedTuple):
    """A line of the table: what was evaluated, with its options, on which file, and the metric."""

    evaluation: str
    data: str
    metric: str


Values = Mapping[Key, tuple[float, float, str]]
"""Value, standard error (NaN without one) and unit of metrics."""


@dataclass(frozen=True)
class Evaluated:
    """The results of one model.

    Attributes:
        name: of the folder.
        values: of each metric, and how much more that is than another model's.
        counts: rows by evaluation and file.
        facts: what else the file says, flat.
        parts: values as above, by label and by length: the metric's name and the part.
        confusions: by evaluation and file how often each label was taken for each, a table in words.
    """

    name: str
    values: Values
    counts: Mapping[tuple[str, str], str]
    facts: Mapping[str, str]
    parts: Values
    confusions: Mapping[tuple[str, str], Sequence[Sequence[str]]]


def read_evaluated(folder: str | Path) -> Evaluated:
    """The results in a folder that ftk-evaluate has written.

    Raises:
        UserError: there are none, or the file is none of ftk-evaluate's.
    """
    path = Path(folder) / RESULTS
    with as_user_error(path):
        content = read_json(path)
    values: dict[Key, tuple[float, float, str]] = {}
    parts: dict[Key, tuple[float, float, str]] = {}
    counts: dict[tuple[str, str], str] = {}
    settings: dict[str, str] = {}
    confusions: dict[tuple[str, str], Sequence[Sequence[str]]] = {}
    try:
        for result in content.pop("results"):
            line, data = str(result["line"]), Path(result["data"]).name
            counts[line, data] = counted(int(result["n"]), "row", ",")
            values |= {Key(line, data, name): value for name, value in _values(result["metrics"])}
            than = f"more than {Path(str(content.get('compared_with'))).name}"
            values |= {Key(line, data, f"{name}, {than}"): value for name, value in _values(result.get("more", {}))}
            settings |= {
                f"{line}, {data}: {name}": value_text(value) for name, value in flat(result.get("settings", {}))
            }
            for part in result.get("parts", ()):
                own = f"{part['part']} (n {int(part['n']):,})"
                parts |= {Key(line, data, f"{own}: {name}"): value for name, value in _values(part["metrics"])}
            if labels := [*map(str, result.get("confusion", {}).get("labels", ()))]:
                rows = [[f"{int(count):,}" for count in row] for row in result["confusion"]["counts"]]
                confusions[line, data] = [
                    ["", *labels],
                    *([label, *row] for label, row in zip(labels, rows, strict=True)),
                ]
        facts = {name: value_text(value) for name, value in flat(content)} | settings
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: holds no results of ftk-evaluate ({type(error).__name__}: {error})") from error
    return Evaluated(Path(folder).resolve().name, values, counts, facts, parts, confusions)


def _values(metrics: Mapping[str, Any]) -> Iterator[tuple[str, tuple[float, float, str]]]:
    for name, metric in metrics.items():
        yield str(name), (_number(metric["value"]), _number(metric["standard_error"]), str(metric["unit"]))


def evaluations_html(models: Sequence[Evaluated], source: str) -> str:
    """The page; what comes from the files is escaped.

    Args:
        models: at least one.
        source: a line about how the page was made.
    """
    title = f"{models[0].name}: evaluation" if len(models) == 1 else f"{len(models)} models: evaluation"
    parts = {
        "TITLE": escape(title),
        "SOURCE": source_line(source),
        "WARNINGS": "".join(f'<p class="warning">{escape(text)}</p>' for text in _warnings(models)),
        "METRICS": _metrics(models, [model.values for model in models]),
        "PARTS": _parts(models),
        "CONFUSIONS": "".join(_confusion_tables(models)),
        "FACTS": _facts(models),
    }
    return fill_template("evaluations.html", parts)


def best_of(values: Sequence[float], unit: str) -> float | None:
    """The best of the values that are numbers, of which shares are the better the more; None: there is but one."""
    finite = [value for value in values if math.isfinite(value)]
    if len(set(finite)) < 2:
        return None
    return max(finite) if unit == "%" else min(finite)


def _metrics(models: Sequence[Evaluated], values: Sequence[Values]) -> str:
    """A table of metrics: `values` of each model."""
    keys = dict.fromkeys(key for own in values for key in own)
    none = (math.nan, math.nan, "")
    rows, before = [], ("", "")
    for key in keys:
        found = [own.get(key, none) for own in values]
        unit = next(own[key][2] for own in values if key in own)
        best = best_of([value for value, _, _ in found], unit)
        cells = "".join(f"<td>{_cell(*cell, is_best=cell[0] == best)}</td>" for cell in found)
        own = (key.evaluation, key.data)
        count = " / ".join(dict.fromkeys(model.counts[own] for model in models if own in model.counts))
        first = (key.evaluation, f"{key.data}, {count}") if own != before else ("", "")
        before = own
        names = "".join(f"<td>{escape(text)}</td>" for text in (*first, key.metric))
        rows.append(f"<tr>{names}{cells}</tr>")
    head = "".join(f"<th>{name}</th>" for name in ("evaluation", "data", "metric"))
    head += "".join(name_cell(model.name, number) for number, model in enumerate(models))
    return f'<div class="scroll"><table class="numbers"><tr>{head}</tr>{"".join(rows)}</table></div>'


def _parts(models: Sequence[Evaluated]) -> str:
    parts = [model.parts for model in models]
    return f"<h2>By label and by length</h2>{_metrics(models, parts)}" if any(parts) else ""


def _confusion_tables(models: Sequence[Evaluated]) -> Iterator[str]:
    for model in models:
        for where, table in model.confusions.items():
            title = escape(", ".join((model.name, *where)))
            rows = "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in table)
            yield f"<h2>{title}: rows are labels, columns are choices</h2>"
            yield f'<div class="scroll"><table class="numbers">{rows}</table></div>'


def _cell(value: float, error: float, unit: str, is_best: bool) -> str:
    if not math.isfinite(value):
        return "–"
    shown = f"{value:.2f} %" if unit == "%" else f"{value:,.4f}"
    if math.isfinite(error):
        shown += f" ± {error:.2f}" if unit == "%" else f" ± {error:,.4f}"
    return f"<b>{escape(shown)}</b>" if is_best else escape(shown)


def _facts(models: Sequence[Evaluated]) -> str:
    names = dict.fromkeys(name for model in models for name in model.facts)
    rows = [(name, [model.facts.get(name, "–") for model in models]) for name in names]
    return comparison_table([model.name for model in models], rows, mark=True)


def _warnings(models: Sequence[Evaluated]) -> Iterator[str]:
    hashes = [_data_hashes(model) for model in models]
    for name in dict.fromkeys(name for own in hashes for name in own):
        found = [own[name] for own in hashes if name in own]
        if any(not (one <= other or other <= one) for one, other in itertools.combinations(found, 2)):
            yield f"The models were evaluated on other data: {name} differs."
    if len({limit for model in models if (limit := model.facts.get("limit")) is not None}) > 1:
        yield "The models were evaluated on other rows (limit): limit differs."
    for model in models:
        if (chosen := model.facts.get("models.0.selected_on", "none")) != "none":
            yield f"{model.name}: the best checkpoint of its run by {chosen}; on the same rows that is optimistic."


def _data_hashes(model: Evaluated) -> dict[str, frozenset[str]]:
    """The sha256 of the files that a model was evaluated on, by their names without folders, as the table has them."""
    hashes: dict[str, frozenset[str]] = {}
    for name, value in model.facts.items():
        if name.startswith(_SHA256):
            file = Path(name.removeprefix(_SHA256)).name
            hashes[file] = hashes.get(file, frozenset()) | {value}
    return hashes


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
        raise TypeError(f"{value!r:.40} is no number")
    return math.nan if value is None else float(value)
