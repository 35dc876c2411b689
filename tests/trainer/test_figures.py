"""Meters, rates under a fake clock, records on disk, and how they are shown."""

from __future__ import annotations

import io
import json
import logging
import math

import pytest
import torch

from ftk.criterions.base import Criterion
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.model_parallel.world import World
from ftk.trainer.log.metrics import Meters, Stopwatch, TrainingFigures, averages, perplexity, with_perplexities
from ftk.trainer.log.progress import BarProgress, JsonProgress, SimpleProgress, duration, make_progress, one_line
from ftk.trainer.log.records import RecordFile, read_records

CPU = torch.device("cpu")
TRAIN = {
    "event": "train",
    "num_updates": 100,
    "epoch": 2,
    "lr": 2e-4,
    "loss": 5.12345,
    "ppl": 167.91,
    "gnorm": 1.5,
    "clip_share": 0.25,
    "loss_token": 5.0,
    "tokens_per_second": 1234.5,
    "target_tokens_per_second": 222.2,
    "updates_per_second": 2.0,
    "skipped_updates": 0,
    "seconds": 50.0,
}
VALID = {"event": "valid", "subset": "valid", "num_updates": 100, "epoch": 2, "loss": 5.0, "ppl": 148.41}


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def pair(total, count):
    return torch.tensor(total), torch.tensor(count)


def test_meters_are_sums_over_counts():
    meters = Meters(CPU)
    meters.add({"loss": pair(6.0, 2), "token": pair(1.0, 1)})
    meters.add({"loss": pair(4.0, 3), "sentence": pair(0.0, 0)})
    meters.add({"loss": pair(math.nan, 5)}, unless=torch.tensor(True))
    assert meters.read() == {"loss": (10.0, 5.0), "token": (1.0, 1.0), "sentence": (0.0, 0.0)}
    assert averages(meters.read()) == {"loss": 2.0, "token": 1.0}


def test_meters_survive_json_to_the_last_bit():
    meters, copy = Meters(CPU), Meters(CPU)
    meters.add({"loss": (torch.tensor(1.0) / 3, torch.tensor(7))})
    copy.load_state_dict(json.loads(json.dumps(meters.read())))
    for m in (meters, copy):
        m.add({"loss": (torch.tensor(2.0) / 7, torch.tensor(1))})
    assert meters.read() == copy.read()


def test_sums_stay_exact_over_a_long_validation():
    meters = Meters(CPU)
    for _ in range(1000):
        meters.add({"loss": pair(1e5 + 0.1, 1)})
    assert meters.read()["loss"][0] == pytest.approx(1000 * torch.tensor(1e5 + 0.1).item(), rel=1e-14)


def test_a_part_that_is_open_at_a_line_goes_on_in_the_next_lap():
    clock = Clock()
    stopwatch = Stopwatch(clock=clock)
    stopwatch.start(previous_seconds=100.0)
    with stopwatch.part("log"):
        clock.now += 1.0
        with stopwatch.part("wait"):  # counted once, as what it is
            clock.now += 2.0
        assert stopwatch.lap().parts == {"log": 1.0, "wait": 2.0}
        clock.now += 4.0
    assert stopwatch.lap() == (4.0, 4.0, {"log": 4.0})
    assert stopwatch.seconds() == 107.0


def test_skipped_updates_are_counted_and_left_out():
    figures = TrainingFigures(World.single(), Stopwatch())
    for loss, skip in [(1.0, False), (math.inf, True), (3.0, False), (math.nan, True), (math.nan, True)]:
        figures.add({"loss": pair(loss, 1)}, skip=torch.tensor(skip), num_tokens=1, num_targets=1)
    assert figures.skipped() == (3, 2)
    assert figures.record()["loss"] == 2.0
    assert figures.skipped() == (3, 2)


def test_targets_that_are_counted_otherwise_than_told_are_refused_at_the_first_whole_record():
    def add(counted, told, skip=False):
        figures.add({"loss": pair(6.0, counted)}, skip=torch.tensor(skip), num_tokens=9, num_targets=told)

    figures = TrainingFigures(World.single(), Stopwatch(), criterion=CrossEntropy(CrossEntropyConfig()))
    add(9, 3)
    add(9, 3, skip=True)
    figures.record()  # not compared: one of the updates is in neither sum nor count of the device
    add(9.0, 3)
    add(3.0, 3)
    with pytest.raises(UserError, match="criterion CrossEntropy: the sum of 'num_targets' is 12, but 'count' says 6"):
        figures.record()
    figures = TrainingFigures(World.single(), Stopwatch())
    figures.load_state_dict({"meters": {"loss": [6.0, 3]}, "skipped": [2, 0]})
    add(3, 3)
    figures.record()  # not compared: half of it was counted before the run went on
    add(2.00001, 2.0)
    figures.record()


def test_a_run_without_a_target_is_warned_of_at_its_first_record(caplog):
    figures = TrainingFigures(World.single(), Stopwatch(), criterion=CrossEntropy(CrossEntropyConfig()))
    for _ in range(2):
        figures.add({"loss": pair(0.0, 0)}, skip=torch.tensor(False), num_tokens=9, num_targets=0)
        figures.record()
    assert [record.message.split(",")[0] for record in caplog.records] == ["no sample had a target token so far"]


def test_every_objective_has_its_perplexity():
    record = with_perplexities({"loss": 2.0, "loss_token": 1.0, "loss_document": 25.0}, Criterion.nats)
    assert (record["ppl"], record["ppl_token"], record["ppl_document"]) == (math.exp(2), math.e, math.exp(20))


def test_a_loss_that_is_no_likelihood_has_no_perplexity():
    record = {"loss": 2.0, "ppl": math.nan, "accuracy": 0.5, "loss_positive": 1.0}
    assert list(with_perplexities(record, nats=())) == ["loss", "accuracy", "loss_positive"]


def test_perplexity_is_of_the_likelihood_without_label_smoothing():
    record = with_perplexities({"loss": 2.0, "loss_token": 2.0, "nll_loss": 1.0}, Criterion.nats)
    assert record["ppl"] == math.e
    assert "ppl_token" not in record


@pytest.mark.parametrize(("loss", "expected"), [(0.0, 1.0), (2.0, math.exp(2)), (25.0, math.exp(20))])
def test_perplexity_is_capped_as_in_the_original(loss, expected):
    assert perplexity(loss) == expected
    assert math.isnan(perplexity(math.nan))


def test_records_beyond_the_resumed_update_are_taken_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = RecordFile(path, 0)
    for update in (10, 20, 30):
        first.write({"event": "train", "num_updates": update, "loss": 0.1})
        first.write({"event": "valid", "num_updates": update, "loss": 0.2})
    first.close()
    with open(path, "a") as stream:
        stream.write('{"event": "tr')
    RecordFile(path, 20).close()
    assert [(r["event"], r["num_updates"]) for r in read_records(path)] == [
        ("train", 10),
        ("valid", 10),
        ("train", 20),
        ("valid", 20),
    ]
    RecordFile(path, 20, validation_pending=True).close()
    assert [(r["event"], r["num_updates"]) for r in read_records(path)][2:] == [("train", 20)]
    RecordFile(path, 0).close()
    assert read_records(path) == []


def test_json_lines_hold_numbers_and_nothing_else():
    out = io.StringIO()
    progress = make_progress("json", 1000, stdout=out, stderr=io.StringIO())
    assert isinstance(progress, JsonProgress)
    progress.start(0)
    progress.update()
    progress.show(TRAIN)
    progress.show({**VALID, "loss": math.nan})
    progress.close()
    train, valid = map(json.loads, out.getvalue().splitlines())
    assert train == TRAIN
    for name in ("num_updates", "loss", "lr", "gnorm", "tokens_per_second"):
        assert isinstance(train[name], int | float)
    assert valid["loss"] is None


def test_a_simple_line_can_be_read():
    assert one_line(TRAIN, 1000) == (
        "train | update 100/1000 | epoch 2 | loss 5.1235 | ppl 167.91 | lr 0.0002 | gnorm 1.500 | tok/s 1234"
        " | targets/s 222 | loss_token 5.0000 | left 0:07:30"
    )
    assert one_line(VALID) == "valid | update 100 | epoch 2 | loss 5.0000 | ppl 148.41"
    early = one_line(with_perplexities({**VALID, "loss": 22.5}, {"loss"}))
    assert early == "valid | update 100 | epoch 2 | loss 22.5000 | ppl >4.85e+08"
    taught = one_line({**TRAIN, "task_loss": 2.0, "teacher_kl": 0.5, "teacher_hidden": 0.25}, 1000)
    assert "| task_loss 2.0000 | teacher_kl 0.5000 | teacher_hidden 0.2500 | left" in taught
    assert one_line({**VALID, "subset": "test"}).startswith("valid test | update 100")
    assert "loss -" in one_line({**TRAIN, "loss": math.nan, "skipped_updates": 3})
    assert "skipped 3" in one_line({**TRAIN, "loss": math.nan, "skipped_updates": 3})


def test_tqdm_without_a_terminal_is_simple():
    assert isinstance(make_progress("tqdm", 10, stdout=io.StringIO(), stderr=io.StringIO()), SimpleProgress)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_lines_of_a_pipe_and_a_bar():
    err = Terminal()
    progress = make_progress("tqdm", 1000, stdout=io.StringIO(), stderr=err)
    assert isinstance(progress, BarProgress)
    progress.start(99)
    progress.update()
    progress.show(TRAIN)
    progress.show(VALID)
    progress.close()
    shown = err.getvalue()
    assert "100/1000" in shown
    for record in (TRAIN, VALID):  # as without a terminal
        assert one_line(record, 1000) in shown
    handlers = {type(handler).__name__ for handler in logging.getLogger().handlers}
    assert "_TqdmLoggingHandler" not in handlers  # the log is back where it was


def test_a_slow_run_says_its_rate_before_the_first_record():
    out, now = io.StringIO(), [0.0]
    progress = SimpleProgress(out, 1000, clock=lambda: now[0])
    progress.start(100)
    for seconds in (4.0, 4.0, 4.0, 4.0):
        now[0] += seconds
        progress.update()
    assert out.getvalue() == "train | update 103/1000 | 4 s/update | left 0:59:48\n"  # once
    progress.show(TRAIN)
    assert out.getvalue().count("\n") == 2


def test_a_run_with_a_record_in_time_needs_no_early_line():
    out, now = io.StringIO(), [0.0]
    progress = SimpleProgress(out, 1000, clock=lambda: now[0])
    progress.start(0)
    progress.show(TRAIN)
    now[0] = 60.0
    progress.update()
    assert out.getvalue().count("\n") == 1


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00:00"), (59.6, "0:01:00"), (3725, "1:02:05"), (-1, "0:00:00")])
def test_durations(seconds, text):
    assert duration(seconds) == text
