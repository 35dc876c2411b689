"""TensorBoard and Weights & Biases as sinks of records, with modules in their place that remember what they get."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import ClassVar

import pytest

from ftk.config import dump
from ftk.errors import UserError
from ftk.trainer.log.sinks import RecordSinks, TensorBoardSink, WandbSink, figures, open_records
from ftk.trainer.state import TrainerState
from tests.records import records_of
from tests.trainer.toy import toy_config, toy_trainer

TRAIN = {"event": "train", "num_updates": 10, "epoch": 1, "loss": 2.0, "gnorm": None, "note": "text", "flag": True}
VALID = {"event": "valid", "subset": "valid", "num_updates": 10, "loss": 3.0}


class FakeWriter:
    made: ClassVar[list] = []

    def __init__(self, folder, purge_step=None):
        self.folder, self.purge_step = folder, purge_step
        self.scalars, self.closed = [], False
        FakeWriter.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        pass

    def close(self):
        self.closed = True


@pytest.fixture
def tensorboard(monkeypatch):
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FakeWriter
    FakeWriter.made = []
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return FakeWriter


class FakeWandb(ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.runs = []

    def init(self, **options):
        run = FakeRun(options)
        self.runs.append(run)
        return run


class FakeRun:
    def __init__(self, options):
        self.options, self.logged, self.metrics, self.finished = options, [], [], False
        self.id = options["id"] or "made-up"

    def define_metric(self, *arguments, **options):
        self.metrics.append((arguments, options))

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    module = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_the_figures_of_a_record_have_full_names():
    assert figures(TRAIN) == {"train/epoch": 1, "train/loss": 2.0}
    assert figures(VALID) == {"valid/loss": 3.0}
    assert figures({**VALID, "subset": "test"}) == {"valid_test/loss": 3.0}


def test_tensorboard_gets_scalars_over_updates(tensorboard):
    sink = TensorBoardSink("folder")
    sink.write(TRAIN)
    sink.write(VALID)
    sink.close()
    (writer,) = tensorboard.made
    assert (writer.folder, writer.purge_step, writer.closed) == ("folder", None, True)
    assert writer.scalars == [("train/epoch", 1, 10), ("train/loss", 2.0, 10), ("valid/loss", 3.0, 10)]


def test_wandb_gets_figures_over_updates_and_goes_on_under_its_id(wandb, tmp_path):
    for _ in range(2):
        sink = WandbSink("project", tmp_path, {"a": 1})
        sink.write(TRAIN)
        sink.close()
    first, second = wandb.runs
    assert first.options == {
        "project": "project",
        "name": tmp_path.name,
        "dir": str(tmp_path),
        "config": {"a": 1},
        "resume": "allow",
        "id": None,
    }
    assert first.logged == [{"num_updates": 10, "train/epoch": 1, "train/loss": 2.0}]
    assert first.finished
    assert (("*",), {"step_metric": "num_updates"}) in first.metrics
    assert second.options["id"] == "made-up"
    WandbSink("another", tmp_path, {}).close()
    assert wandb.runs[2].options["id"] is None


def test_a_wandb_that_cannot_begin_is_said_in_one_line(wandb, tmp_path):
    def init(**options):
        raise RuntimeError("api_key not\nconfigured")

    wandb.init = init
    with pytest.raises(UserError, match=r"^`wandb_project` p: api_key not configured; WANDB_MODE=offline needs no acc"):
        WandbSink("p", tmp_path, {})


@pytest.mark.parametrize(
    ("module", "options", "extra"),
    [
        ("torch.utils.tensorboard", {"report__tensorboard_dir": "tb"}, "tensorboard"),
        ("wandb", {"report__wandb_project": "p"}, "wandb"),
    ],
)
def test_a_missing_package_is_answered_by_its_extra(tmp_path, monkeypatch, module, options, extra):
    monkeypatch.setitem(sys.modules, module, None)  # so that importing it fails
    with pytest.raises(UserError, match=rf"needs the package {extra}; install it by: pip install 'ftk\[{extra}\]'"):
        toy_trainer(tmp_path, **options)
    assert not (tmp_path / "run").exists()  # the run was refused


def test_nothing_is_imported_unless_it_is_asked_for(tmp_path, monkeypatch):
    for name in ("torch.utils.tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    open_records(toy_config(tmp_path), tmp_path, TrainerState()).close()


def test_a_sink_that_fails_is_left_out_and_the_others_go_on(caplog):
    class Fails:
        def write(self, record):
            raise ConnectionError("no route")

        def close(self):
            raise AssertionError("it was left out")

    class Keeps:
        def __init__(self):
            self.records, self.closed = [], False

        def write(self, record):
            self.records.append(record)

        def close(self):
            self.closed = True

    keeps = Keeps()
    sinks = RecordSinks([Fails(), keeps])
    sinks.write(TRAIN)
    sinks.write(VALID)
    sinks.close()
    assert keeps.records == [TRAIN, VALID]
    assert keeps.closed
    assert caplog.text.count("Fails takes no more records (ConnectionError: no route)") == 1


def test_a_run_and_its_continuation_fill_both(tmp_path, tensorboard, wandb):
    options = {"report__tensorboard_dir": str(tmp_path / "tb"), "report__wandb_project": "toys"}
    toy_trainer(tmp_path, **options, training__max_update=6).train()
    toy_trainer(tmp_path, **options, training__max_update=10).train()
    expected = [
        (name, value, record["num_updates"])
        for record in records_of(tmp_path / "run")
        for name, value in figures(record).items()
    ]
    first, second = tensorboard.made
    assert [first.purge_step, second.purge_step] == [None, 7]
    assert first.scalars + second.scalars == expected
    assert first.closed
    assert second.closed
    logged = [values for run in wandb.runs for values in run.logged]
    assert [
        (n, v, values["num_updates"]) for values in logged for n, v in values.items() if n != "num_updates"
    ] == expected
    assert {"train/loss", "train/peak_memory_bytes", "valid/ppl"} <= {name for name, _, _ in expected}
    assert all(math.isfinite(value) for _, value, _ in expected)
    assert wandb.runs[1].options["id"] == wandb.runs[0].id
    assert wandb.runs[0].options["config"] == dump(toy_config(tmp_path / "run", **options, training__max_update=6))
    assert all(run.finished for run in wandb.runs)
