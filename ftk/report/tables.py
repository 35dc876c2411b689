"""The tables of final and best figures, and of where the time went."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape

from ftk.report.charts import NUM_COLOURS
from ftk.report.runs import Curve, Run
from ftk.report.scales import short
from ftk.terminal import duration

GIB = 2.0**30
PARTS = {
    # field: what it is called
    "forward_backward_share": "forward and backward",
    "optimizer_share": "optimizer",
    "data_share": "waiting for data",
    "wait_share": "waiting for the device",
    "log_share": "log",
    "validation_share": "validation",
    "checkpoint_share": "checkpoints",
    "other_share": "other",
}


def figures_table(runs: Sequence[Run]) -> str:
    """Final and best figures, a row for each run; the best of several runs in bold."""
    columns: list[tuple[str, Callable[[Run], float], Callable[[float], str], Callable[..., float] | None]] = [
        ("updates", lambda run: _last(run, "train", "num_updates"), "{:,.0f}".format, None),
        ("epoch", lambda run: _last(run, "train", "epoch"), "{:,.0f}".format, None),
        ("loss, last", lambda run: _last(run, "train", "loss"), "{:.4f}".format, min),
        ("valid loss, last", lambda run: _last(run, _split(run), "loss"), "{:.4f}".format, min),
        ("valid loss, best", lambda run: best(run)[0], "{:.4f}".format, min),
        ("at update", lambda run: best(run)[1], "{:,.0f}".format, None),
        ("valid ppl, best", lambda run: best(run, "ppl")[0], short, min),
        ("tokens/s", lambda run: _median(run.curve("train", "tokens_per_second")), short, max),
        ("targets/s", lambda run: _median(run.curve("train", "target_tokens_per_second")), short, max),
        ("FLOP/s", lambda run: _median(run.curve("train", "flops_per_second")), short, max),
        ("MFU", lambda run: _median(run.curve("train", "mfu")), "{:.1%}".format, max),
        ("peak memory", lambda run: _max(run.curve("train", "peak_memory_bytes")) / GIB, "{:.2f} GiB".format, min),
        ("time", _training_seconds, duration, None),
        ("skipped", lambda run: _last(run, "train", "skipped_updates"), "{:,.0f}".format, None),
        ("starts", lambda run: len(run.starts) or math.nan, "{:,.0f}".format, None),
    ]
    shown = []
    for name, figure, form, better in columns:
        values = [figure(run) for run in runs]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            mark = better(finite) if better and len(set(finite)) > 1 else None
            shown.append((name, [_cell(form(v) if math.isfinite(v) else "–", v == mark) for v in values]))
    head = "".join(f"<th>{name}</th>" for name, _ in shown)
    rows = [
        f"<tr>{name_cell(run.name, number)}{''.join(cells[number] for _, cells in shown)}</tr>"
        for number, run in enumerate(runs)
    ]
    return f'<div class="scroll"><table class="numbers"><tr><th>run</th>{head}</tr>{"".join(rows)}</table></div>'


def best(run: Run, figure: str = "loss", maximize: bool = False) -> tuple[float, float]:
    """(best value of the first validation split, number of updates where it was first); NaN if there is none."""
    curve = run.curve(_split(run), figure)
    sign = -1.0 if maximize else 1.0
    points = [(sign * v, u) for v, u in zip(curve.values, curve.updates, strict=True) if math.isfinite(v)]
    value, updates = min(points, default=(math.nan, math.nan))
    return sign * value, updates


def split_table(runs: Sequence[Run]) -> str:
    """The share of each part in the time of each run, as a bar and in numbers."""
    shares = [{field: mean_share(run, field) for field in PARTS} for run in runs]
    fields = [field for field in PARTS if any(own[field] >= 0.0005 for own in shares)]
    if not fields:
        return '<p class="faint">The runs have not recorded where their time went.</p>'
    head = "".join(f'<th><i class="swatch p{list(PARTS).index(field)}"></i>{PARTS[field]}</th>' for field in fields)
    rows = []
    for number, (run, own) in enumerate(zip(runs, shares, strict=True)):
        bar = "".join(
            f'<rect class="p{list(PARTS).index(field)}" x="{100 * sum(own[f] for f in fields[:place]):.2f}" y="0" '
            f'width="{100 * own[field]:.2f}" height="10"><title>{PARTS[field]} {own[field]:.1%}</title></rect>'
            for place, field in enumerate(fields)
            if own[field] > 0.0
        )
        picture = f'<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none">{bar}</svg></td>'
        cells = "".join(_cell(f"{own[field]:.1%}" if own[field] >= 0.0005 else "–", False) for field in fields)
        rows.append(f"<tr>{name_cell(run.name, number)}{picture}{cells}</tr>")
    table = f'<table class="numbers"><tr><th>run</th><th></th>{head}</tr>{"".join(rows)}</table>'
    return f'<div class="scroll">{table}</div>'


def mean_share(run: Run, field: str) -> float:
    """The mean of a share over a run, each record weighted by the time it stands for; 0 if there is none."""
    curve = run.curve("train", field)
    total = weights = before = 0.0
    for hours, value in zip(curve.hours, curve.values, strict=True):
        weight = max(hours - before, 0.0) if math.isfinite(hours) else 1.0
        before = hours if math.isfinite(hours) else before
        if math.isfinite(value):
            total, weights = total + weight * min(max(value, 0.0), 1.0), weights + weight
    return total / weights if weights else 0.0


def name_cell(name: str, number: int) -> str:
    """The name of a run or model in a table, with its colour."""
    return f'<th><i class="swatch c{number % NUM_COLOURS}"></i>{escape(name)}</th>'


def _cell(text: str, is_best: bool) -> str:
    return f"<td>{'<b>' if is_best else ''}{escape(text)}{'</b>' if is_best else ''}</td>"


def _split(run: Run) -> str:
    return (run.splits() or ["valid"])[0]


def _last(run: Run, event: str, figure: str) -> float:
    """The last value of a figure, NaN if there is none."""
    value = run.last.get(event, {}).get(figure)
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else math.nan


def _training_seconds(run: Run) -> float:
    times = [_last(run, event, "seconds") for event in run.last]
    return max((time for time in times if math.isfinite(time)), default=math.nan)


def _median(curve: Curve) -> float:
    finite = [value for value in curve.values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _max(curve: Curve) -> float:
    return max((value for value in curve.values if math.isfinite(value)), default=math.nan)
