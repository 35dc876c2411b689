"""When a run validates, saves, prunes and stops."""

from __future__ import annotations

import errno
import io
import math
import os
import re

import pytest

from ftk.checkpoint import resolve_checkpoint
from ftk.config import load_yaml
from ftk.criterions.cross_entropy import CrossEntropy, CrossEntropyConfig
from ftk.errors import UserError
from ftk.trainer import Trainer, build_run
from ftk.trainer.config import CheckpointConfig
from ftk.trainer.hooks import Hook
from tests.records import records_of
from tests.trainer.test_hooks import WithHooks
from tests.trainer.toy import Scripted, ToyModel, ToyTask, assert_same, toy_config, toy_trainer

# A validation after each update, of one batch, so that each scripted loss is one validation.
EACH = {"training__validate_interval_updates": 1, "dataloader__max_valid_samples": 4, "checkpoint__keep_last": 1}


def saved(tmp_path):
    return sorted(int(path.name[11:]) for path in (tmp_path / "run").glob("checkpoint_[0-9]*"))


def test_the_best_checkpoint_is_that_of_the_lowest_loss(tmp_path):
    losses = [3.0, 2.0, 2.5, 1.0, 1.0, 4.0]
    trainer = toy_trainer(tmp_path, criterion=Scripted(losses), training__max_update=6, **EACH)
    summary = trainer.train()
    assert [record["loss"] for record in records_of(tmp_path / "run", "valid")] == losses
    assert (summary.best.value, summary.best.num_updates) == (1.0, 4)
    assert resolve_checkpoint(tmp_path / "run" / "checkpoint_best").name == "checkpoint_4"
    assert resolve_checkpoint(tmp_path / "run" / "checkpoint_last").name == "checkpoint_6"
    assert resolve_checkpoint(tmp_path / "run").name == "checkpoint_4"
    assert saved(tmp_path) == [4, 6]


@pytest.mark.parametrize("maximize", [False, True])
def test_a_validation_that_is_not_a_number_is_never_the_best(tmp_path, maximize):
    losses = [math.nan, 3.0, math.nan, 2.0]
    options = {**EACH, "training__max_update": 4, "checkpoint__maximize_best_metric": maximize}
    summary = toy_trainer(tmp_path, criterion=Scripted(losses), **options).train()
    assert summary.best.num_updates == (2 if maximize else 4)
    assert resolve_checkpoint(tmp_path / "run" / "checkpoint_best").name == f"checkpoint_{summary.best.num_updates}"
    assert [record["loss"] for record in records_of(tmp_path / "run", "valid")] == [None, 3.0, None, 2.0]


@pytest.mark.parametrize(
    ("metric", "maximizes"),
    [("macro_f1", True), ("ema_accuracy", True), ("bleu", True), ("rougeL", True), ("ppl", False), ("gpu_mem", False)],
)
def test_a_score_is_the_better_the_larger(metric, maximizes):
    assert CheckpointConfig(best_metric=metric).maximizes is maximizes
    assert CheckpointConfig(best_metric=metric, maximize_best_metric=True).maximizes


def test_another_metric_can_rank_and_be_maximised(tmp_path):
    options = {"checkpoint__best_metric": "ppl", "checkpoint__maximize_best_metric": True}
    options |= {"training__max_update": 3, **EACH}
    trainer = toy_trainer(tmp_path, criterion=Scripted([1.0, 3.0, 2.0]), **options)
    assert trainer.train().best.num_updates == 2


def test_an_unknown_metric_is_refused_with_the_known_ones_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match=r"`best_metric` bleu is not one .*: loss, ppl, accuracy"):
        toy_trainer(tmp_path, criterion=Scripted([1.0]), checkpoint__best_metric="bleu", **EACH)
    assert not (tmp_path / "run").exists()


def test_a_metric_that_a_hook_may_add_is_wondered_at_and_refused_at_the_first_validation(tmp_path, caplog):
    class Bleu(Hook):
        def after_validation(self, step, results):
            results["valid"]["blue"] = 1.0

    task = WithHooks(tmp_path, Bleu())
    trainer = toy_trainer(tmp_path, task=task, checkpoint__best_metric="bleu", **EACH)
    assert "if no hook adds it, the run ends at its first validation" in caplog.text
    with pytest.raises(UserError, match=r"`best_metric` bleu is not one .*, blue"):
        trainer.train()


@pytest.mark.parametrize("name", ["accuracy", "ema_accuracy"])
def test_a_figure_of_the_criterion_can_rank_and_looking_for_it_changes_no_bit(tmp_path, name):
    options = {"training__max_update": 4, "ema__ema_decay": 0.9, **EACH}
    looking = {"save_dir": "looking", "checkpoint__best_metric": name}
    ranked = toy_trainer(tmp_path, criterion=Scripted([1.0] * 99), **looking, **options)
    assert ranked.train().best.metric == name
    plain = toy_trainer(tmp_path, criterion=Scripted([1.0] * 99), **options)
    plain.train()
    assert_same(ranked, plain)


@pytest.mark.parametrize(
    ("losses", "patience", "updates"),
    [([3, 2, 2, 2, 1], 2, 4), ([3, 2, 2, 1, 2, 2], 2, 6), ([1, 2, 3, 4, 5, 6], 3, 4), ([5, 4, 3, 2], 1, 4)],
)
def test_patience_counts_validations_without_a_new_best(tmp_path, losses, patience, updates):
    criterion = Scripted([float(loss) for loss in losses])
    trainer = toy_trainer(
        tmp_path, criterion=criterion, training__max_update=len(losses), training__patience=patience, **EACH
    )
    assert trainer.train().num_updates == updates


def test_patience_goes_on_counting_after_a_restart(tmp_path):
    options = {**EACH, "training__patience": 3, "lr_scheduler__decay_updates": 50}
    toy_trainer(tmp_path, criterion=Scripted([1.0, 2.0, 2.0]), training__max_update=3, **options).train()
    summary = toy_trainer(tmp_path, criterion=Scripted([2.0] * 9), training__max_update=12, **options).train()
    assert summary.num_updates == 4
    assert summary.reason == "no better loss in 3 validations"
    again = toy_trainer(tmp_path, criterion=Scripted([]), training__max_update=12, **options).train()
    assert again.num_updates == 4


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"keep_last": 1}, [2, 10]),
        ({"keep_last": 3}, [2, 8, 9, 10]),
        ({"keep_last": 0}, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        ({"keep_last": 1, "keep_best": 3}, [2, 5, 7, 10]),
        ({"keep_last": 1, "keep_interval_updates": 4}, [2, 4, 8, 10]),
        ({"keep_last": 2, "keep_interval_updates": 5, "keep_best": 2}, [2, 5, 9, 10]),
    ],
)
def test_pruning_keeps_the_last_the_best_and_the_intervals(tmp_path, options, kept):
    losses = [9.0, 1.0, 8.0, 7.0, 2.0, 6.0, 3.0, 5.0, 5.0, 5.0]
    options = {f"checkpoint__{name}": value for name, value in options.items()}
    trainer = toy_trainer(
        tmp_path, criterion=Scripted(losses), checkpoint__save_interval_updates=1, **{**EACH, **options}
    )
    trainer.train()
    assert saved(tmp_path) == kept
    assert (tmp_path / "run" / "checkpoint_best").resolve().name == "checkpoint_2"
    assert (tmp_path / "run" / "checkpoint_last").resolve().name == "checkpoint_10"


def test_epochs_end_with_a_validation_and_the_run_with_its_last_epoch(tmp_path):
    summary = toy_trainer(  # 24 samples in batches of 5, two at a time: 3 updates an epoch
        tmp_path,
        training__max_update=None,
        training__max_epoch=3,
        training__validate_interval=2,
        training__validate_interval_updates=0,
        training__update_freq=2,
        dataloader__batch_size=5,
        checkpoint__save_interval=1,
        checkpoint__keep_last=0,
    ).train()
    assert (summary.num_updates, summary.epoch) == (9, 3)
    assert [(r["num_updates"], r["epoch"]) for r in records_of(tmp_path / "run", "valid")] == [(6, 2), (9, 3)]
    assert saved(tmp_path) == [3, 6, 9]
    assert "max_epoch 3 is reached" in summary.reason


def test_the_lower_of_two_limits_ends_the_run_and_shapes_the_schedule(tmp_path):
    trainer = toy_trainer(tmp_path, training__max_update=100, training__max_epoch=1)
    assert trainer.run.total_updates == 6
    assert trainer.train().num_updates == 6


def test_hours_count_over_restarts(tmp_path):
    def clock():
        clock.now += 60.0
        return clock.now

    clock.now = 0.0
    config = toy_config(tmp_path / "run", training__stop_time_hours=0.25)
    task = ToyTask(tmp_path)
    first = Trainer(
        build_run(config, task=task, model=ToyModel(), criterion=CrossEntropy(CrossEntropyConfig()), clock=clock)
    )
    summary = first.train()
    assert 0 < summary.num_updates < 10
    assert "stop_time_hours 0.25 are over" in summary.reason
    second = Trainer(
        build_run(config, task=task, model=ToyModel(), criterion=CrossEntropy(CrossEntropyConfig()), clock=clock)
    )
    assert second.train().num_updates == summary.num_updates


def test_no_save_writes_no_checkpoint(tmp_path):
    summary = toy_trainer(tmp_path, checkpoint__save=False).train()
    assert sorted(path.name for path in (tmp_path / "run").glob("[!.]*")) == [
        "config.yaml",
        "environment.json",
        "metrics.jsonl",
    ]
    assert not summary.saved


def test_a_batch_larger_than_the_training_set_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    toy_trainer(tmp_path, dataloader__batch_size=1000, training__max_update=1, training__update_freq=2).train()
    size = len(ToyTask(tmp_path).load_split("train"))
    said = f"only {size} samples to train on, fewer than the batch of 2000 (`batch_size` 1000 in 2 batches): "
    assert f"{said}each epoch is one update of {size}\n" in caplog.text
    assert "1 update an epoch, up to 1 update;" in caplog.text
    assert "stopped: max_update 1 is reached (1 update, epoch 1" in caplog.text
    caplog.clear()
    toy_trainer(tmp_path, save_dir="usual", training__max_update=1).train()
    assert "fewer than the batch" not in caplog.text


@pytest.mark.parametrize(("warmup", "is_said"), [(7, True), (6, False)])
def test_a_warmup_longer_than_the_run_is_said(tmp_path, caplog, warmup, is_said):
    options = {"training__max_update": 6, "lr_scheduler__warmup_updates": warmup}
    toy_trainer(tmp_path, **options).train()
    assert ("the warm-up (7 updates) is longer than the run (6 updates)" in caplog.text) == is_said


@pytest.mark.parametrize(("load", "is_said"), [(1.1, True), (1.0, False)])
def test_busy_cores_are_said(tmp_path, caplog, monkeypatch, load, is_said):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    caplog.set_level("INFO")
    toy_trainer(tmp_path, training__max_update=1).train()
    assert ("this machine is busy (load average 1.1 on 2 cores)" in caplog.text) == is_said


def test_the_log_file_has_the_log_and_the_figures(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "logs" / "run.txt"
    toy_trainer(tmp_path, logging__log_file=str(path), training__max_update=4).train()
    toy_trainer(tmp_path, logging__log_file=str(path), training__max_update=5).train()
    text = path.read_text()
    for part in ("| train | update 2/4 |", "| valid | update 4/4 |", "continuing after 4 updates", "next: ftk-"):
        assert part in text
    with pytest.raises(UserError, match=r"`log_file` .*: cannot be written"):
        toy_trainer(tmp_path, logging__log_file=str(tmp_path))


def test_without_a_valid_subset_nothing_is_validated(tmp_path):
    summary = toy_trainer(tmp_path, dataloader__valid_subset=None).train()
    assert summary.best is None
    assert saved(tmp_path) == [10]
    assert records_of(tmp_path / "run", "valid") == []


def test_every_valid_subset_is_validated_and_the_first_one_ranks(tmp_path):
    trainer = toy_trainer(tmp_path, dataloader__valid_subset="valid, validation")
    summary = trainer.train()
    records = records_of(tmp_path / "run", "valid")
    assert [r["subset"] for r in records] == ["valid", "validation"] * 2
    assert summary.best.value == min(r["loss"] for r in records if r["subset"] == "valid")


IN_THE_WAY = {
    "a file": (lambda run: run.write_text(""), r"`save_dir` .*run: a file is in the way"),
    "a data folder": (
        lambda run: (run.mkdir(), (run / "preprocess.json").write_text("{}")),
        r"`save_dir` .*run: it holds data",
    ),
    **{
        f"a pipe in place of {name}": (
            lambda run, name=name: (run.mkdir(), os.mkfifo(run / name)),
            f"{re.escape(name)}.*is a pipe, not a regular file",
        )
        for name in (".lock", "metrics.jsonl")
    },
}


@pytest.mark.parametrize("what", IN_THE_WAY)
def test_what_cannot_be_a_run_folder_is_refused_and_stays(tmp_path, what):
    put, message = IN_THE_WAY[what]
    put(tmp_path / "run")
    before = sorted((tmp_path / "run").rglob("*"))
    with pytest.raises(UserError, match=message):
        toy_trainer(tmp_path)
    ours = [tmp_path / "run" / name for name in (".lock", "config.yaml") if what == "a pipe in place of metrics.jsonl"]
    assert sorted((tmp_path / "run").rglob("*")) == sorted([*before, *ours])


def test_a_run_folder_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "run").mkdir()

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("ftk.trainer.run_folder.open_lock", refuse)
    with pytest.raises(UserError, match=r"`save_dir` .*run/\.lock: no permission to write there"):
        toy_trainer(tmp_path)


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl"])
def test_a_link_in_the_place_of_a_file_that_stays_open_is_refused(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match=f"{re.escape(name)}.*is a link"):
        toy_trainer(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine\n"


@pytest.mark.parametrize("name", ["config.yaml", "config.yaml.tmp", "metrics.jsonl.tmp"])
def test_a_link_in_the_place_of_a_file_that_is_written_whole_is_not_followed(tmp_path, name):
    toy_trainer(tmp_path, training__max_update=4).train()
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "run" / name).unlink(missing_ok=True)
    (tmp_path / "run" / name).symlink_to(tmp_path / "precious")
    toy_trainer(tmp_path, training__max_update=5).train()
    assert (tmp_path / "precious").read_text() == "mine\n"
    assert load_yaml(tmp_path / "run" / "config.yaml")["training"]["max_update"] == 5


@pytest.mark.parametrize("line", ['{"num_updates": "x"}', '{"num_updates": null}', "[" * 100_000, "\x00"])
def test_damaged_records_are_left_out_when_the_run_goes_on(tmp_path, line):
    toy_trainer(tmp_path, training__max_update=4).train()
    metrics = tmp_path / "run" / "metrics.jsonl"
    good = metrics.read_text()
    metrics.write_text(f"{line}\n{good}")
    toy_trainer(tmp_path, training__max_update=5).train()
    assert metrics.read_text().startswith(good)


class FullStream(io.StringIO):
    def flush(self):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_behind_standard_output_is_said_once_and_no_end_of_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("sys.stdout", FullStream())
    assert toy_trainer(tmp_path).train().exit_code == 0
    assert caplog.text.count("progress can no longer be shown (No space left on device)") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 7


def test_a_full_disk_behind_the_log_file_is_said_once(tmp_path, caplog, capsys):
    assert toy_trainer(tmp_path, logging__log_file="/dev/full").train().exit_code == 0
    assert caplog.text.count("/dev/full: cannot be written (No space left on device)") == 1
    assert caplog.text.count("/dev/full: the last lines are lost") == 1
    assert "Traceback" not in capsys.readouterr().err


def test_two_runs_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ftk.trainer.run_folder.LOCK_WAIT_SECONDS", 0.3)
    first = toy_trainer(tmp_path)
    with pytest.raises(UserError, match="another ftk-train is running in it"):
        toy_trainer(tmp_path)
    assert first.train().num_updates > 0
