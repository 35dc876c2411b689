"""Runs as one HTML page that needs no network: curves, figures, what differs between the runs, environment."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from ftk.errors import UserError
from ftk.files import as_user_error, open_regular, write_whole
from ftk.report.charts import NUM_COLOURS, Chart, Line, Mark, chart_html
from ftk.report.environment import facts
from ftk.report.runs import Curve, Run
from ftk.report.tables import GIB, figures_table, name_cell, split_table
from ftk.version import __version__

_GENERATOR = b'<meta name="generator" content="ftk-report">'
_START = 1024  # bytes of a page, in which that stands
_UNWRITTEN = "the report cannot be written"
_MAIN_FACTS = ("command", "host", "ftk.version", "ftk.commit", "torch.version", "cpu.model", "torch.threads", "gpus")


def report_html(runs: Sequence[Run], source: str) -> str:
    """The page. What comes from the runs is escaped: it cannot become markup or script.

    Args:
        runs: at least one.
        source: a line about how the page was made.
    """
    title = f"{runs[0].name}: training report" if len(runs) == 1 else f"{len(runs)} runs: training report"
    parts = {
        "TITLE": escape(title),
        "SOURCE": source_line(source),
        "LEGEND": _legend(runs),
        "WARNINGS": "".join(f'<p class="warning">{escape(text)}</p>' for text in _warnings(runs)),
        "FIGURES": figures_table(runs),
        "NATS": _NATS if _has_perplexity(runs) else "",
        "CHARTS": _charts(runs),
        "SPLIT": split_table(runs),
        "DIFFERENCES": _differences(runs),
        "ENVIRONMENT": _environment(runs),
        "STARTS": _starts(runs),
        "CONFIGURATIONS": _configurations(runs),
    }
    return fill_template("page.html", parts, "; script-src 'unsafe-inline'")


def fill_template(template: str, parts: Mapping[str, str], scripts: str = "") -> str:
    """A page with its parts in the places of their names; `scripts`: what its Content-Security-Policy says of them."""
    own = files("ftk.report")
    head, body, style = (own.joinpath(name).read_text("utf-8") for name in ("head.html", template, "page.css"))
    parts = {**parts, "STYLE": style, "SCRIPTS": scripts}
    pieces = f"{head}{body}".split("%%")  # text, name, text, name, ..., text
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def source_line(source: str) -> str:
    """A line about how a page was made, with ftk's version and the time."""
    made = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return escape(f"{source} · ftk {__version__} · {made}")


def check_page(path: Path, overwrite: bool) -> None:
    """Refuses to replace a file that ftk-report did not write, unless it may be overwritten.

    Raises:
        UserError: it is such a file.
    """
    if overwrite or not path.is_file():
        return
    with as_user_error(path, _UNWRITTEN), open_regular(path) as file:
        start = file.read(_START)
    if _GENERATOR not in start:
        raise UserError(
            f"`output` {path}: ftk-report has not written it; choose another, or replace it with `overwrite`"
        )


def write_page(path: Path, page: str) -> None:
    """Write a page; it appears whole or not at all.

    Raises:
        UserError: the file cannot be written.
    """
    with as_user_error(path, _UNWRITTEN):
        write_whole(path, page.encode("utf-8", "backslashreplace"))


_NATS = "Losses are in nats per target token; ppl is exp(loss), the loss capped at 20. "
_NOT_MEASURED = re.compile("ppl|ema_|num_|(epoch|seconds|valid_seconds)$")


def charts_of(runs: Sequence[Run]) -> list[Chart]:
    """The charts of what the runs have recorded, in reading order."""
    marks = [mark for number, run in enumerate(runs) for mark in _marks(run, number)]

    def train(title: str, unit: str, figure: str, scale: float = 1.0, from_zero: bool = False) -> Chart:
        return Chart(title, unit, _lines(runs, figure, ["train"], scale), marks, from_zero)

    rates = [value for run in runs for value in run.curve("train", "flops_per_second").values]
    scale, letter = (1e12, "T") if max(filter(math.isfinite, rates), default=0.0) >= 1e12 else (1e9, "G")
    unit = "nats per target token" if _has_perplexity(runs) else ""
    losses = [Chart(_title(figure), unit, _lines(runs, figure, None), marks) for figure in _losses(runs)]
    measured = [Chart(_title(figure), "", _lines(runs, figure, None), marks) for figure in _measured(runs)]
    charts = [
        *losses[:1],
        train("Learning rate", "", "lr", from_zero=True),
        train("Throughput", "tokens/s, padding counted", "tokens_per_second", from_zero=True),
        train("Gradient norm", "before clipping", "gnorm", from_zero=True),
        *losses[1:],
        *measured,
        train("Targets", "tokens, labels, pairs with a loss/s", "target_tokens_per_second", from_zero=True),
        train("Rate of operations", f"{letter}FLOP/s", "flops_per_second", 1 / scale, from_zero=True),
        train("MFU", "% of the device's peak", "mfu", 100.0, from_zero=True),
        train("Peak memory", "GiB", "peak_memory_bytes", 1 / GIB, from_zero=True),
        train("Waiting for data", "% of the time", "data_share", 100.0, from_zero=True),
        train("Clipped updates", "%", "clip_share", 100.0, from_zero=True),
        train("Loss scale", "fp16", "loss_scale"),
        train("Skipped updates", "in all", "skipped_updates", from_zero=True),
    ]
    mostly_zero = ("Skipped updates", "Clipped updates")
    return [
        chart
        for chart in charts
        if not chart.is_empty()
        and (chart.title not in mostly_zero or any(value > 0 for line in chart.lines for value in line.curve.values))
    ]


def _lines(runs: Sequence[Run], figure: str, events: list[str] | None, scale: float = 1.0) -> list[Line]:
    """The figure's curve of each run and event; None: of training and of each validation split.

    After a validation's curve follows that of the averaged weights, if there is one.
    """
    lines = []
    for number, run in enumerate(runs):
        splits = run.splits()
        for event in events or ["train", *splits]:
            curve = run.curve(event, figure)
            if scale != 1.0:
                curve = Curve(curve.updates, curve.hours, [scale * value for value in curve.values])
            if len(curve):
                style = "train" if event == "train" else "valid" if event == splits[0] else "more"
                label = f"{run.name}, {event}" if len(runs) > 1 else event
                lines.append(Line(label, curve, number, style))
                averaged = run.curve(event, f"ema_{figure}")
                if len(averaged):
                    lines.append(Line(f"{label}, averaged weights", averaged, number, "more"))
    return lines


def _losses(runs: Sequence[Run]) -> list[str]:
    """Names of the figures that are losses, `loss` first; those of averaged weights are drawn with their own."""
    found = dict.fromkeys(name for run in runs for _, name in run.curves if "loss" in name and name != "loss_scale")
    names = [name for name in found if not name.startswith("ema_")]
    return sorted(names, key=lambda name: (name != "loss", names.index(name)))


def _measured(runs: Sequence[Run]) -> list[str]:
    """Names of the other figures of validations: what a criterion meters, and what evaluations found."""
    found = dict.fromkeys(name for run in runs for event, name in run.curves if event != "train")
    return [name for name in found if "loss" not in name and not _NOT_MEASURED.match(name)]


def _has_perplexity(runs: Sequence[Run]) -> bool:
    return any(name.startswith("ppl") for run in runs for _, name in run.curves)


def _title(figure: str) -> str:
    """ "Loss", "Loss: token" of the samples of one group, "Nll loss"."""
    name, _, group = figure.partition("_")
    words = f"loss: {group}" if name == "loss" and group else figure
    return words[:1].upper() + words[1:].replace("_", " ")


def _marks(run: Run, number: int) -> Iterator[Mark]:
    """The restarts of a run."""
    train = run.curve("train", "loss")
    for start in run.starts[1:]:
        updates = start.get("num_updates")
        if isinstance(updates, int) and updates > 0:
            hours = [h for u, h in zip(train.updates, train.hours, strict=True) if u <= updates]
            label = f"{run.name}: restarted after update {updates} ({start.get('time', 'time unknown')})"
            yield Mark(updates, hours[-1] if hours else 0.0, number, label)


def _charts(runs: Sequence[Run]) -> str:
    charts = charts_of(runs)
    if not charts:
        return '<p class="faint">No figures are recorded yet.</p>'
    return "".join(chart_html(chart, number) for number, chart in enumerate(charts))


def _legend(runs: Sequence[Run]) -> str:
    keys = "".join(
        f'<button type="button" class="run c{number % NUM_COLOURS}" data-run="{number}" aria-pressed="true">'
        f'<i class="swatch"></i>{escape(run.name)}</button>'
        for number, run in enumerate(runs)
    )
    styles = '<span class="key"><i class="thin"></i>training</span>'
    splits = list(dict.fromkeys(split for run in runs for split in run.splits()))
    if splits:
        styles += f'<span class="key"><i class="thick"></i>{escape(splits[0])}</span>'
    averaged = any(name == "ema_loss" for run in runs for _, name in run.curves)
    dotted = [*splits[1:], *(["averaged weights"] if averaged else [])]
    if dotted:
        styles += f'<span class="key"><i class="dotted"></i>{escape(", ".join(dotted))}</span>'
    if any(len(run.starts) > 1 for run in runs):
        styles += '<span class="key"><i class="restart"></i>restart</span>'
    return keys + styles


def _warnings(runs: Sequence[Run]) -> Iterator[str]:
    for run in runs:
        if run.broken_lines:
            yield f"{run.name}: lines of metrics.jsonl that could not be read and are left out: {run.broken_lines}."
        if not run.num_records:
            yield f"{run.name}: there are no figures yet (metrics.jsonl is missing or empty)."
        elif not run.splits():
            yield f"{run.name}: the run has not validated."


def _differences(runs: Sequence[Run]) -> str:
    """The options in which the configurations of the runs differ."""
    if len(runs) == 1:
        return '<p class="faint">One run; give several to see what differs.</p>'
    all_options = [run.options() for run in runs]
    names = dict.fromkeys(name for options in all_options for name in options)
    missing = object()
    rows = []
    for name in names:
        values = [options.get(name, missing) for options in all_options]
        if any(value != values[0] for value in values):
            rows.append((name, ["–" if value is missing else value_text(value) for value in values]))
    if not rows:
        return '<p class="faint">The configurations are equal.</p>'
    return comparison_table([run.name for run in runs], rows)


def _environment(runs: Sequence[Run]) -> str:
    """The environment of each run's last start; what differs between runs is marked."""
    if not any(run.starts for run in runs):
        return '<p class="faint">No environment is recorded (environment.json).</p>'
    facts_of_runs = []
    for run in runs:
        start = dict(run.starts[-1]) if run.starts else {}
        command = start.pop("command", None)
        for name in ("time", "num_updates", "pid", "end"):
            start.pop(name, None)
        run_facts = dict(facts(start))
        if isinstance(command, list):
            run_facts = {"command": " ".join(map(str, command)), **run_facts}
        facts_of_runs.append(run_facts)
    names = dict.fromkeys(name for run_facts in facts_of_runs for name in run_facts)
    rows = [(name, [run_facts.get(name, "–") for run_facts in facts_of_runs]) for name in names]
    first = [(name, values) for name, values in rows if name in _MAIN_FACTS or len(set(values)) > 1]
    of_runs = [run.name for run in runs]
    everything = f"<details><summary>everything</summary>{comparison_table(of_runs, rows)}</details>"
    return comparison_table(of_runs, first, mark=True) + everything


def _starts(runs: Sequence[Run]) -> str:
    rows = []
    for number, run in enumerate(runs):
        for start in run.starts:
            end = start.get("end")
            how = (
                f"{end.get('reason', 'ended')} (update {end.get('num_updates', '?')}, {end.get('time', '?')})"
                if isinstance(end, dict)
                else "no end is recorded: killed, or still running"
            )
            cells = (start.get("time", "?"), start.get("num_updates", "?"), start.get("host", "?"), how)
            rest = "".join(f"<td>{escape(str(cell))}</td>" for cell in cells)
            rows.append(f"<tr>{name_cell(run.name, number)}{rest}</tr>")
    if not rows:
        return '<p class="faint">No starts are recorded (environment.json).</p>'
    head = "".join(f"<th>{name}</th>" for name in ("run", "started", "after update", "host", "how it ended"))
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _configurations(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        options = run.options()
        text = "\n".join(f"{name}: {value_text(value)}" for name, value in options.items()) or "no config.yaml"
        parts.append(f"<details><summary>{escape(run.name)}</summary><pre>{escape(text)}</pre></details>")
    return "".join(parts)


def comparison_table(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]], *, mark: bool = False) -> str:
    """A table with a column for each run or model; with `mark`, rows in which they differ are marked."""
    head = "".join(name_cell(name, number) for number, name in enumerate(names))
    lines = []
    for what, values in rows:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        differs = " class=differs" if mark and len(set(values)) > 1 else ""
        lines.append(f"<tr{differs}><th>{escape(what)}</th>{cells}</tr>")
    return f'<div class="scroll"><table class="plain"><tr><th></th>{head}</tr>{"".join(lines)}</table></div>'


def value_text(value: object) -> str:
    """A value of a configuration, as a table shows it."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "none" if value is None or value == {} else str(value)
