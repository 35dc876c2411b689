"""The page: what it shows, that it needs nothing from outside, and that nothing from outside can act in it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import xml.etree.ElementTree
from html.parser import HTMLParser

import pytest

from ftk.report import charts
from ftk.report.charts import Chart, Line, chart_html
from ftk.report.page import charts_of, report_html
from ftk.report.runs import Curve, read_run, read_runs
from ftk.report.tables import best, mean_share

VOID = {"meta", "br", "link", "img", "input"}
EVIL = "</script><script>alert(1)</script>\"'<img src=x onerror=alert(1)>&"


class Page(HTMLParser):
    """Elements with their attributes, the text of scripts, and whether every element is closed."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.open, self.text = [], [], [], ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] != "style":
            self.text += data

    def all(self, tag, **attributes):
        return [own for name, own in self.elements if name == tag and attributes.items() <= own.items()]


def train(updates, **figures):
    base = {"event": "train", "num_updates": updates, "epoch": 1, "lr": 1e-3, "loss": 5.0, "ppl": 148.0, "gnorm": 1.0}
    base |= {"tokens_per_second": 1000.0, "skipped_updates": 0, "seconds": updates * 1.0}
    return {**base, **figures}


def valid(updates, loss, **figures):
    return {"event": "valid", "subset": "valid", "num_updates": updates, "loss": loss, "ppl": 99.0, **figures}


def write_run(folder, records, config=None, starts=None):
    folder.mkdir(parents=True)
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if config is not None:
        (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    if starts is not None:
        (folder / "environment.json").write_text(json.dumps(starts), encoding="utf-8")
    return folder


def records(num=10):
    return [
        record for n in range(1, num + 1) for record in (train(10 * n, loss=6 - n / num), valid(10 * n, 6.1 - n / num))
    ]


def titles(run):
    return [chart.title for chart in charts_of([run])]


def test_a_run_is_read_with_its_broken_lines_counted(tmp_path):
    endless = '{"event": "train", "num_updates": 3, "text": "' + "x" * (1 << 20) + '"}'
    lines = [
        *records(2),
        endless,
        '{"event": "tr',
        "[]",
        '{"event": "train"}',
        "",
        '{"event": "train", "num_updates": NaN}',
    ]
    run = read_run(write_run(tmp_path / "run", lines, {"a": {"b": [1, 2]}}, [{"num_updates": 0}]))
    assert (run.num_records, run.broken_lines, run.splits()) == (4, 5, ["valid"])
    curve = run.curve("train", "loss")
    assert (list(curve.updates), list(curve.values)) == ([10.0, 20.0], [5.5, 5.0])
    assert list(curve.hours) == [10 / 3600, 20 / 3600]
    assert run.options() == {"a.b": [1, 2]}


def test_the_figures_of_a_run_in_its_table(tmp_path):
    run = read_run(
        write_run(
            tmp_path / "run",
            [
                train(10, data_share=0.5, seconds=10.0, mfu=0.25, peak_memory_bytes=2**31),
                valid(10, 4.0),
                train(40, data_share=0.1, seconds=40.0, mfu=0.75, peak_memory_bytes=2**32),
                valid(40, 4.5),
            ],
        )
    )
    assert best(run) == (4.0, 10.0)
    assert mean_share(run, "data_share") == pytest.approx((10 * 0.5 + 30 * 0.1) / 40)
    page = Page(report_html([run], "test"))
    for text in ("4.0000", "4.5000", "50.0%", "4.00 GiB", "0:00:40", "20.0%"):
        assert text in page.text, text


def test_the_page_is_whole_and_asks_nothing_of_a_network(tmp_path):
    runs = read_runs([str(write_run(tmp_path / name, records())) for name in ("one", "two")])
    text = report_html(runs, "ftk-report one two")
    page = Page(text)
    assert page.open == []
    assert "%%" not in text
    for _, attributes in page.elements:
        assert not {"src", "href", "srcset", "action"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(|fetch\(|XMLHttpRequest|innerHTML", text)
    (policy,) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'")
    assert "one" in page.text
    assert "two" in page.text


def test_nothing_from_outside_becomes_markup_or_script(tmp_path):
    """Names of runs, figures and splits, options, environment: whatever can be chosen by somebody else."""
    folder = write_run(
        tmp_path / EVIL.replace("/", "∕"),
        [train(10, **{f"loss_{EVIL}": 1.0}), {**valid(10, 3.0), "subset": EVIL}, train(20)],
        {"section": {EVIL: EVIL}, EVIL: None},
        [
            {"time": EVIL, "num_updates": 0, "host": EVIL, "command": [EVIL], "torch": {EVIL: [EVIL]}, EVIL: EVIL},
            {"time": EVIL, "num_updates": 10, "end": {"reason": EVIL, "num_updates": EVIL, "time": EVIL}},
        ],
    )
    other = write_run(tmp_path / "plain", records())
    text = report_html(read_runs([str(folder), str(other)]), EVIL)
    page = Page(text)
    assert page.open == []
    assert page.all("img") == []
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert text.count("<script>") == 1  # our own
    assert "alert(1)" in page.text  # shown as the text that it is
    for script in page.scripts[:-1]:
        json.loads(script)


def test_the_charts_are_wellformed_svg_with_every_form(tmp_path):
    run = read_run(write_run(tmp_path / "run", [*records(), train(110, loss=None), train(120)]))
    for number, chart in enumerate(charts_of([run])):
        html = chart_html(chart, number)
        pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
        for picture in pictures:
            xml.etree.ElementTree.fromstring(picture)
        names = [re.search(r'class="([\w ]+)"', picture)[1] for picture in pictures]
        assert "updates linear" in names
        assert "nan" not in html
        assert "inf" not in html.replace("infinite", "")


def test_the_script_points_where_the_charts_are_drawn(tmp_path):
    text = report_html([read_run(write_run(tmp_path / "run", records()))], "test")
    numbers = re.search(r"LEFT = (\d+), RIGHT = (\d+), TOP = (\d+), BOTTOM = (\d+);", text)
    drawn = (charts.LEFT, charts.WIDTH - charts.RIGHT, charts.TOP, charts.HEIGHT - charts.BOTTOM)
    assert tuple(map(int, numbers.groups())) == drawn
    assert f"* {charts.WIDTH} / box.width" in text


def test_a_null_is_a_gap_in_the_curve():
    curve = Curve([1, 2, 3, 4, 5], [0.1] * 5, [1.0, 2.0, float("nan"), 3.0, float("nan")])
    html = chart_html(Chart("x", "", [Line("run", curve, 0)]), 0)
    path = re.search(r'<g class="line train c0" data-run="0"><path d="([^"]+)"/>(.*?)</g>', html)
    assert re.sub(r"[^ML]", "", path[1]) == "MLM"
    assert path[2].count("<circle") == 1  # the value between two gaps would not be seen otherwise


@pytest.mark.parametrize(("hours", "label"), [(0.5, "minutes"), (10.0, "hours"), (200.0, "days")])
def test_time_is_told_in_a_unit_that_fits(hours, label):
    curve = Curve([1, 2], [0.0, hours], [1.0, 2.0])
    html = chart_html(Chart("x", "", [Line("run", curve, 0)]), 0)
    assert set(re.findall(r">(\w+) of training<", html)) == {label}


def test_averaged_weights_are_drawn_beside_the_plain_ones(tmp_path):
    run = read_run(
        write_run(tmp_path / "run", [train(10), valid(10, 4.0, ema_loss=3.5, loss_token=1.0, ema_loss_token=0.9)])
    )
    lines = {chart.title: [line.label for line in chart.lines] for chart in charts_of([run])}
    assert lines["Loss"] == ["train", "valid", "valid, averaged weights"]
    assert lines["Loss: token"] == ["valid", "valid, averaged weights"]
    assert not any("ema" in title.lower() for title in lines)


def test_what_a_validation_measures_is_drawn_and_nats_are_named_where_losses_have_a_perplexity(tmp_path):
    found = {"accuracy": 0.5, "f1_macro": 40.0, "num_targets": 8, "valid_seconds": 0.1, "epoch": 1, "ema_accuracy": 0.6}
    of_classes = [{key: one for key, one in record.items() if key != "ppl"} for record in (train(10), valid(10, 0.7))]
    run = read_run(write_run(tmp_path / "run", [of_classes[0] | {"accuracy": 0.4}, of_classes[1] | found]))
    lines = {chart.title: [line.label for line in chart.lines] for chart in charts_of([run])}
    assert lines["Accuracy"] == ["train", "valid", "valid, averaged weights"]
    assert [*lines] == ["Loss", "Learning rate", "Throughput", "Gradient norm", "Accuracy", "F1 macro"]
    assert "nats" not in report_html([run], "test")
    of_words = read_run(write_run(tmp_path / "words", [train(10), valid(10, 5.0)]))
    assert "Losses are in nats per target token; ppl is exp(loss)" in report_html([of_words], "test")


def test_what_a_run_lacks_is_left_out(tmp_path):
    run = read_run(write_run(tmp_path / "run", [train(10), train(20)]))
    page = Page(report_html([run], "test"))
    assert "the run has not validated" in page.text
    assert titles(run) == ["Loss", "Learning rate", "Throughput", "Gradient norm"]
    full = read_run(
        write_run(
            tmp_path / "full",
            [train(10, loss_token=1.0, flops_per_second=1e9, mfu=0.5, clip_share=1.0, loss_scale=8.0)],
        )
    )
    assert titles(full)[4:] == ["Loss: token", "Rate of operations", "MFU", "Clipped updates", "Loss scale"]


@pytest.mark.parametrize("lines", [[], ["nonsense"], [train(5)], [{"event": "valid", "num_updates": 3, "loss": None}]])
def test_runs_with_next_to_nothing(tmp_path, lines):
    page = Page(report_html([read_run(write_run(tmp_path / "run", lines, {}))], "test"))
    assert page.open == []


def test_a_huge_run_gives_a_page_of_reasonable_size(tmp_path):
    lines = [train(n, loss=5 + 0.001 * (n % 97), tokens_per_second=1000.0 + n % 13) for n in range(1, 60_001)]
    lines[30_000]["loss"] = 77.0
    run = read_run(write_run(tmp_path / "run", lines))
    text = report_html([run], "test")
    assert len(text) < 1_500_000
    assert ",77" in text  # the one spike is still there


def test_differences_and_restarts(tmp_path):
    starts = [
        {"time": "2026-01-01T00:00:00+00:00", "num_updates": 0, "host": "a", "torch": {"version": "2.12"}},
        {"time": "2026-01-02T00:00:00+00:00", "num_updates": 50, "host": "b", "torch": {"version": "2.13"}},
    ]
    starts[1]["end"] = {"time": "2026-01-03T00:00:00+00:00", "num_updates": 100, "reason": "max_update 100 is reached"}
    one = write_run(tmp_path / "one", records(), {"optimizer": {"lr": 1e-3, "eps": 1}, "x": {"y": True}}, starts)
    two = write_run(tmp_path / "two", records(), {"optimizer": {"lr": 2e-3, "eps": 1}}, [])
    runs = read_runs([str(one), str(two)])
    text = report_html(runs, "test")
    page = Page(text)
    differing = text[text.index("What differs") : text.index("<h2>Starts")]
    assert "optimizer.lr" in differing
    assert "0.002" in differing
    assert "x.y" in differing
    assert "optimizer.eps" not in differing
    assert "no end is recorded: killed, or still running" in page.text
    assert "max_update 100 is reached (update 100" in page.text
    assert "one: restarted after update 50 (2026-01-02T00:00:00+00:00)" in page.text
    (mark,) = charts_of(runs)[0].marks
    assert (mark.updates, mark.hours, mark.run) == (50, 50 / 3600, 0)
    assert "The configurations are equal." in report_html(read_runs([str(one), str(one)]), "test")


def test_runs_of_the_same_name_are_told_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "run", records(1)) for parent in ("a", "b")]
    assert [run.name for run in read_runs(list(map(str, folders)))] == ["a/run", "b/run"]


def test_more_runs_than_colours(tmp_path):
    runs = read_runs([str(write_run(tmp_path / f"run{n}", records(2))) for n in range(9)])
    text = report_html(runs, "test")
    assert 'class="line train c1 again" data-run="8"' in text


def test_the_command_writes_a_page(tmp_path, command):
    write_run(tmp_path / "run", records())
    done = command("ftk-report", "run", "--output", "page.html", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "page.html: run (20 records)\n"), done.stderr
    assert Page((tmp_path / "page.html").read_text(encoding="utf-8")).open == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_page_of_its_own_is_replaced_and_a_file_of_the_users_only_with_overwrite(tmp_path, command):
    write_run(tmp_path / "run", records())
    for _ in range(2):
        assert command("ftk-report", "run", cwd=tmp_path).returncode == 0
    (tmp_path / "report.html").write_text("mine")
    done = command("ftk-report", "run", cwd=tmp_path, code=2)
    assert "--output report.html: ftk-report has not written it; choose another, or replace it with" in done.stderr
    assert (tmp_path / "report.html").read_text() == "mine"
    assert command("ftk-report", "run", "--overwrite", cwd=tmp_path).returncode == 0
    assert Page((tmp_path / "report.html").read_text(encoding="utf-8")).open == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere: no such folder; give the --save-dir of a run"),
        (["empty"], "empty is not a run: there is neither metrics.jsonl nor config.yaml in it"),
        (["run", "--output", "no/such/folder.html"], "no/such/folder.html: the report cannot be written (No such file"),
        (["run", "empty"], "empty is not a run"),
        (["run", "--output", ""], "output is empty"),
        (["run", "--output", "empty"], "empty: the report cannot be written (is a directory)"),
        (["run", "--output", "/dev/full"], "/dev/full: the report cannot be written (is a device, not a regular file)"),
        (["pipes"], "pipes is not a run: there is neither metrics.jsonl"),
        (["run", "empty\x1b[31m"], "empty\\x1b[31m: no such folder"),
    ],
)
def test_mistakes_are_said_in_one_line(tmp_path, command, arguments, message):
    write_run(tmp_path / "run", records(1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "pipes").mkdir()
    os.mkfifo(tmp_path / "pipes" / "metrics.jsonl")
    done = command("ftk-report", *arguments, cwd=tmp_path, code=2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2
    assert not (tmp_path / "report.html").exists()


DRIVER = """<script>
const chart = document.querySelector("figure.chart"), svg = chart.querySelector("svg");
const box = svg.getBoundingClientRect();
const at = { clientX: box.left + 616 / 640 * box.width, clientY: box.top + 10, bubbles: true };
svg.dispatchEvent(new PointerEvent("pointermove", at));
document.querySelector('.run[data-run="1"]').click();
document.querySelector('.over[data-over="hours"]').click();
</script></body>"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Debian's chromium")
def test_the_page_in_a_browser(tmp_path):
    """Without a network: values under the pointer, a click that hides a run, and the switch to time."""
    runs = [write_run(tmp_path / name, records(count)) for name, count in (("one", 10), ("two", 4))]
    page = report_html(read_runs(list(map(str, runs))), "test").replace("</body>", DRIVER)
    (tmp_path / "page.html").write_text(page, encoding="utf-8")
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += f" --disable-component-update --disable-sync --user-data-dir={tmp_path}/profile --dump-dom"
    shown = subprocess.run(
        ["chromium", *flags.split(), f"file://{tmp_path}/page.html"], capture_output=True, text=True, timeout=120
    ).stdout
    assert re.search(r'<body class="[^"]*hours', shown)
    tip = re.search(r'class="tip"[^>]*>(.*?)</figure>', shown, re.DOTALL)[1]
    assert "<b>5</b> at 100" in tip  # the last training loss of the first run
    assert shown.count("<circle") >= 2
    hidden = re.findall(r'<g class="line[^"]* off" data-run="(\d)"', shown)
    assert set(hidden) == {"1"}
