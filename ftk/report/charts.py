"""Charts as inline SVG: no library, no script needed to see them. A script may read their values, see `page.html`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from ftk.parsing import json_in_html
from ftk.report.runs import Curve
from ftk.report.scales import Axis, axis_for, short, thin

WIDTH, HEIGHT = 640, 330
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 14, 44
COLUMNS = WIDTH - LEFT - RIGHT
NUM_COLOURS = 7  # --c0 to --c6 of page.css (Okabe and Ito's, which colour-blind readers can distinguish)
MARKED = 40  # a curve of at most this many points has them marked


@dataclass(frozen=True)
class Line:
    """A curve on a chart.

    Attributes:
        label: for the values under the pointer, e.g. "run-1, valid".
        curve: what is drawn.
        run: number of the run, which gives the colour.
        style: "train" (thin), "valid" (thick), "more" (dotted).
    """

    label: str
    curve: Curve
    run: int
    style: str = "train"


@dataclass(frozen=True)
class Mark:
    """A restart: an upright line.

    Attributes: number of updates, hours of training or None, number of the run, what to say.
    """

    updates: float
    hours: float | None
    run: int
    label: str


@dataclass(frozen=True)
class Chart:
    """A figure of all runs.

    Attributes:
        title: what it shows.
        unit: of the values.
        lines, marks: what is drawn.
        from_zero: whether the linear axis begins at 0.
        log: whether the logarithmic form is shown first.
    """

    title: str
    unit: str
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    from_zero: bool = False
    log: bool = False

    def is_empty(self) -> bool:
        return not any(math.isfinite(value) for line in self.lines for value in line.curve.values)


def chart_html(chart: Chart, number: int) -> str:
    """The chart as a figure with its four forms: over updates or hours, linear or logarithmic.

    Which form is seen is up to the page's classes, so that switching needs no drawing. The logarithmic form is left
    out where a value is not above 0, the one over hours where a record has no time.

    Args:
        chart: what to show; not empty.
        number: of the chart on the page.
    """
    thinned = [_thinned(line) for line in chart.lines if len(line.curve)]
    values = [v for line in thinned for v in line.curve.values if math.isfinite(v)]
    hours = [h for line in thinned for h in line.curve.hours]
    can_log = min(values) > 0.0 and max(values) > 1.05 * min(values)
    has_hours = all(map(math.isfinite, hours))
    forms = [
        _form(chart, thinned, values, log=log, over=over)
        for over in (("updates", "hours") if has_hours else ("updates",))
        for log in ((False, True) if can_log else (False,))
    ]
    data = [
        {
            "label": line.label,
            "run": line.run,
            "updates": line.curve.updates,
            "hours": [_number(h) for h in line.curve.hours],
            "values": [_number(v) for v in line.curve.values],
        }
        for line in thinned
    ]
    classes = "chart" + (" log" if can_log and chart.log else "") + ("" if has_hours else " only-updates")
    switch = (
        '<button type="button" class="scale" aria-pressed="{}">log</button>'.format("true" if chart.log else "false")
        if can_log
        else ""
    )
    unit = f' <span class="faint">{escape(chart.unit)}</span>' if chart.unit else ""
    return (
        f'<figure class="{classes}" id="chart-{number}"><figcaption><h3>{escape(chart.title)}{unit}</h3>{switch}'
        f'</figcaption><div class="plot">{"".join(forms)}<div class="tip" hidden></div></div>'
        f'<script type="application/json">{json_in_html(data)}</script></figure>'
    )


def _form(chart: Chart, lines: Sequence[Line], values: Sequence[float], *, log: bool, over: str) -> str:
    across = [x for line in lines for x in getattr(line.curve, over)]
    across += [x for mark in chart.marks if (x := getattr(mark, over)) is not None]
    low, high = min(across), max(across)
    x_axis = Axis(low, high if high > low else low + 1.0, LEFT, WIDTH - RIGHT)
    y_axis = axis_for(values, HEIGHT - BOTTOM, TOP, log=log, from_zero=chart.from_zero)
    axes = json.dumps({"x": [x_axis.low, x_axis.high], "y": [y_axis.low, y_axis.high], "log": log, "over": over})
    label = f"{chart.title} over {over}, {'logarithmic' if log else 'linear'}"
    parts = [
        f'<svg class="{over} {"logarithmic" if log else "linear"}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}" data-axes="{escape(axes)}">',
        _grid(x_axis, y_axis, over),
    ]
    for mark in chart.marks:
        if (x := getattr(mark, over)) is not None:
            place = f"{x_axis.place(x):.1f}"
            parts.append(
                f'<g class="mark {_colour(mark.run)}" data-run="{mark.run}"><title>{escape(mark.label)}</title>'
                f'<path d="M{place} {TOP}V{HEIGHT - BOTTOM}"/><path class="head" d="M{place} {TOP}l-5 -8h10z"/></g>'
            )
    parts += [_path(line, x_axis, y_axis, over) for line in lines]
    parts.append('<g class="pointer"></g></svg>')
    return "".join(parts)


def _grid(x_axis: Axis, y_axis: Axis, over: str) -> str:
    parts = ['<g class="grid">']
    for tick in y_axis.ticks():
        place = f"{y_axis.place(tick):.1f}"
        parts.append(f'<path d="M{LEFT} {place}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{place}" dy=".35em" text-anchor="end">{short(tick)}</text>')
    unit, scale = ("updates", 1.0) if over == "updates" else _time_unit(x_axis.high)
    for tick in Axis(scale * x_axis.low, scale * x_axis.high, LEFT, WIDTH - RIGHT).ticks():
        place = f"{x_axis.place(tick / scale):.1f}"
        parts.append(f'<path d="M{place} {HEIGHT - BOTTOM}v5"/>')
        parts.append(f'<text x="{place}" y="{HEIGHT - BOTTOM + 21}" text-anchor="middle">{short(tick)}</text>')
    parts.append(f'<path class="axis" d="M{LEFT} {HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
    parts.append(f'<text class="faint" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">{unit}</text></g>')
    return "".join(parts)


def _time_unit(hours: float) -> tuple[str, float]:
    """A unit in which `hours` has few digits, and how many of it make an hour."""
    if hours < 2.0:
        return "minutes of training", 60.0
    return ("hours of training", 1.0) if hours < 96.0 else ("days of training", 1 / 24)


def _path(line: Line, x_axis: Axis, y_axis: Axis, over: str) -> str:
    """The curve; a gap where there is no number, a dot for a number between two gaps."""
    steps, dots = [], []
    points = list(zip(getattr(line.curve, over), line.curve.values, strict=True))
    marked = line.style != "train" and len(points) <= MARKED
    pen_is_down = False
    for index, (x, y) in enumerate(points):
        if not math.isfinite(y):
            pen_is_down = False
            continue
        place = f"{x_axis.place(x):.1f} {y_axis.place(y):.1f}"
        steps.append(f"{'L' if pen_is_down else 'M'}{place}")
        alone = not pen_is_down and (index + 1 == len(points) or not math.isfinite(points[index + 1][1]))
        if marked or alone:
            dots.append('<circle cx="{}" cy="{}" r="3"/>'.format(*place.split()))
        pen_is_down = True
    classes = f"line {line.style} {_colour(line.run)}"
    return f'<g class="{classes}" data-run="{line.run}"><path d="{"".join(steps)}"/>{"".join(dots)}</g>'


def _colour(run: int) -> str:
    """The class of a run's colour; from the eighth on colours repeat, dashed."""
    return f"c{run % NUM_COLOURS}" + (" again" if run >= NUM_COLOURS else "")


def _thinned(line: Line) -> Line:
    curve = line.curve
    places = thin(curve.updates, curve.values, COLUMNS // 2)
    fewer = Curve(*([numbers[p] for p in places] for numbers in (curve.updates, curve.hours, curve.values)))
    return Line(line.label, fewer, line.run, line.style)


def _number(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None
