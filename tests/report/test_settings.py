"""Runs by setting: seeds belong together, the best mean is first, and both forms say the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ftk.errors import UserError
from ftk.report.runs import read_runs
from ftk.report.settings import settings_of
from ftk_cli.hydra_train import main as hydra_train
from ftk_cli.hydra_train import tell_settings
from ftk_cli.report import main as report
from tests.paths import ROOT
from tests.report.test_report import train, valid, write_run


@pytest.fixture
def folders(tmp_path):
    """Three learning rates with two seeds each, and runs without a validation."""
    found = []
    for lr, seed, accuracies in (
        (0.1, 1, (40, 60)),
        (0.1, 2, (70, 50)),
        (0.2, 1, (90, 20)),
        (0.2, 2, (30,)),
        (0.3, 1, ()),
        (0.3, 2, (10,)),
        (0.4, 1, ()),
    ):
        folder = tmp_path / f"lr_{lr}_seed_{seed}"
        lines = [train(5), *(valid(10 * n, 1.0, accuracy=value) for n, value in enumerate(accuracies, start=1))]
        options = {"best_metric": "accuracy", "maximize_best_metric": True, "save_dir": str(folder)}
        config = {"common": {"seed": seed}, "optimizer": {"lr": lr}, "checkpoint": options}
        found.append(str(write_run(folder, lines, {**config, "report": {"tensorboard": str(folder)}})))
    return found


def test_seeds_of_one_setting_are_one_line_and_the_best_mean_is_first(folders):
    found = settings_of(read_runs(folders))
    assert (found.metric, found.maximize) == ("accuracy", True)
    assert [dict(one.options) for one in found.found] == [{"optimizer.lr": lr} for lr in (0.1, 0.2, 0.3, 0.4)]
    assert [one.mean for one in found.found[:3]] == [65.0, 60.0, 10.0]
    assert [one.deviation for one in found.found[:2]] == [pytest.approx(50**0.5), pytest.approx(1800**0.5)]
    head, first, second, third, fourth, last = found.lines()
    assert head.split() == ["optimizer.lr", "runs", "accuracy", "deviation", "best", "run"]
    assert first.split() == ["0.1", "2", "65.0000", "7.0711", "70.0000", folders[1]]
    assert second.split() == ["0.2", "2", "60.0000", "42.4264", "90.0000", folders[2]]
    assert third.split() == ["0.3", "1", "of", "2", "10.0000", "–", "10.0000", folders[5]]
    assert fourth.split() == ["0.4", "0", "of", "1", "–", "–", "–"]
    assert last == "best mean accuracy: 65.0000 with optimizer.lr 0.1"


def test_the_report_prints_them_and_writes_them_as_json(folders, tmp_path, capsys):
    page, file = tmp_path / "report.html", tmp_path / "settings.json"
    assert report([*folders, "--output", str(page), "--settings", str(file)]) == 0
    said = capsys.readouterr().out
    assert all(line in said for line in settings_of(read_runs(folders)).lines())
    written = json.loads(file.read_text())
    assert [one["mean"] for one in written["settings"]] == [65.0, 60.0, 10.0, None]
    assert written["settings"][0] == {
        "options": {"optimizer.lr": 0.1},
        "runs": {folders[0]: 60.0, folders[1]: 70.0},
        "mean": 65.0,
        "deviation": pytest.approx(50**0.5),
        "best_run": folders[1],
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "results.json").write_text("{}")
    assert report([str(tmp_path / "results"), "--settings", str(file)]) == 2
    assert "--settings is for runs" in capsys.readouterr().err


def test_where_there_is_no_table_a_line_says_why(folders, tmp_path, capsys):
    config = Path(folders[1]) / "config.yaml"
    config.write_text(config.read_text().replace("accuracy", "loss"))
    with pytest.raises(UserError, match=r"`best_metric` is accuracy of .*lr_0.1_seed_1 and loss of .*lr_0.1_seed_2"):
        settings_of(read_runs(folders))
    tell_settings([folders[0], folders[0]], tmp_path)
    assert capsys.readouterr().out.startswith("no table of settings: the runs have one checkpoint.save_dir")


@pytest.mark.slow
def test_a_sweep_ends_with_its_settings(data_bin, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["ftk-hydra-train"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    own = ["task.seq_length=48", "training.max_update=1", "dataloader.max_valid_samples=4", "common.device=cpu"]
    swept = ["model.num_layers=1", "optimizer.lr=1e-3,1e-2", "common.seed=1,2", "checkpoint.save=false"]
    folder = "checkpoint.save_dir=runs/${optimizer.lr}_${common.seed}"
    argv = ["-m", "--config-name", "glm_tiny", f"dataset.data={data_bin}", *own, *swept, folder]
    assert hydra_train([*argv, f"hydra.sweep.dir={tmp_path / 'sweep'}"]) == 0
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "sweep" / "settings.json").read_text())
    assert f"written to {tmp_path / 'sweep' / 'settings.json'}" in said
    assert sorted(one["options"]["optimizer.lr"] for one in written["settings"]) == [0.001, 0.01]
    assert all(len(one["runs"]) == 2 and one["deviation"] > 0 for one in written["settings"])
    assert f"best mean loss: {written['settings'][0]['mean']:.4f} with optimizer.lr" in said
    assert hydra_train([*argv, "common.device=none,cpu", f"hydra.sweep.dir={tmp_path / 'failed'}"]) == 2
    assert "no table of settings: a run failed; `ftk-report FOLDER" in capsys.readouterr().out
    saved = yaml.safe_load((tmp_path / "runs" / "0.001_2" / "config.yaml").read_text())
    assert (saved["common"]["seed"], saved["optimizer"]["lr"]) == (2, 0.001)


@pytest.mark.slow
def test_a_sweep_by_submitit_trains_each_setting_in_a_process_of_its_own(data_bin, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    own = ["task.seq_length=48", "training.max_update=1", "dataloader.max_valid_samples=4", "common.device=cpu"]
    swept = ["model.num_layers=1", "optimizer.lr=1e-3,1e-2", "checkpoint.save=false", "hydra.sweep.dir=sweep"]
    argv = ["-m", "--config-name", "glm_tiny", "hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
    folder = "checkpoint.save_dir=runs/${optimizer.lr}"
    done = subprocess.run(
        [sys.executable, "-m", "ftk_cli", "hydra-train", *argv, f"dataset.data={data_bin}", *own, *swept, folder],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "no table of settings: the launcher ran them elsewhere; " in done.stdout
    runs = sorted((tmp_path / "runs").iterdir())
    assert [run.name for run in runs] == ["0.001", "0.01"]
    assert all((run / "metrics.jsonl").read_text(encoding="utf-8") for run in runs)
    assert report([*map(str, runs), "--settings", str(tmp_path / "settings.json")]) == 0
