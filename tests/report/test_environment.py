"""What ftk-env prints, and the starts in environment.json."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import time

import pytest
import torch

from ftk.report import environment, starts
from ftk.report.environment import extensions, extras, facts, git_commit, variables
from ftk.report.starts import Starts, read_starts
from ftk.version import __version__


def test_the_command_says_what_a_bug_report_needs(command):
    done = command("ftk-env", code=0)
    lines = dict(line.split(None, 1) for line in done.stdout.splitlines() if not line.startswith(" "))
    assert lines["ftk.version"] == __version__
    assert lines["torch.version"] == torch.__version__
    assert lines["variables.OMP_NUM_THREADS"] == "1"
    assert lines["torch.threads"] == "1"
    for name in (
        "ftk.commit",
        "ftk.extensions",
        "python.version",
        "platform.system",
        "cpu.model",
        "gpus",
        "packages.numpy",
    ):
        assert lines[name], name


def test_json_holds_the_same(command):
    done = command("ftk-env", "--json")
    told = json.loads(done.stdout)
    assert told["torch"]["version"] == torch.__version__
    assert told["ftk"]["extensions"]["ftk.tasks.glm_blank.samples._samples"] == "built"
    assert [name for name, _ in facts(told)][:2] == ["ftk.version", "ftk.commit"]


def test_secrets_are_hidden_and_other_variables_left_out():
    given = {
        "FTK_TOKEN": "s3cret",
        "WANDB_API_KEY": "s3cret",
        "TORCH_HOME": "/data/torch",
        "FTK_PROXY": "http://me:s3cret@proxy:80",
        "OMP_NUM_THREADS": "4",
        "HOME": "/home/me",
        "AWS_SECRET": "s3cret",
        "RANK": "0",
    }
    shown = variables(given)
    assert shown == {
        "FTK_PROXY": "http://(hidden)@proxy:80",
        "FTK_TOKEN": "(hidden)",
        "OMP_NUM_THREADS": "4",
        "RANK": "0",
        "TORCH_HOME": "/data/torch",
        "WANDB_API_KEY": "(hidden)",
    }
    assert "s3cret" not in str(shown)


def test_the_users_folder_is_not_named(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jane")
    assert variables({"TORCH_HOME": "/home/jane/torch"}) == {"TORCH_HOME": "~/torch"}


def test_the_commit_and_whether_files_differ_from_it(tmp_path):
    if shutil.which("git") is None:
        pytest.skip("needs git")
    assert git_commit(tmp_path) is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    commit = git_commit(tmp_path)
    assert commit is not None
    assert len(commit) == 40
    (tmp_path / "file").write_text("2")
    assert git_commit(tmp_path) == f"{commit}+changes"


def test_the_state_of_extensions(tmp_path, monkeypatch):
    assert set(extensions().values()) <= {"built", "older than its source"}
    found = environment.importlib.util.find_spec
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda n: None if n.endswith("_index") else found(n))
    assert extensions()["ftk.data.indexed._index"] == "missing"


def test_the_state_of_extras(monkeypatch):
    needed = ["torch>=2", 'pytest>=8; extra == "test"', "numpy; extra == 'both'", "no-such-package>1; extra == 'both'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: needed)
    assert extras() == {"test": "found", "both": "missing: no-such-package"}


def test_another_cudnn_than_torchs_is_said_and_ends_nothing(monkeypatch):
    def refuse():
        raise RuntimeError("cuDNN version incompatibility: found (9, 19, 0)\nmore")

    monkeypatch.setattr("torch.backends.cudnn.is_available", lambda: True)
    monkeypatch.setattr("torch.backends.cudnn.version", refuse)
    assert environment._torch()["cudnn"] == "cuDNN version incompatibility: found (9, 19, 0)"


def test_starts_are_appended_and_ended(tmp_path):
    Starts(tmp_path).begin(0)
    Starts(tmp_path).begin(40)
    Starts(tmp_path).end(90, "max_update 90 is reached")
    first, second = read_starts(tmp_path / "environment.json")
    assert (first["num_updates"], second["num_updates"]) == (0, 40)
    assert "end" not in first
    assert second["end"]["reason"] == "max_update 90 is reached"
    assert second["end"]["num_updates"] == 90
    assert second["pid"] == os.getpid()
    assert second["torch"]["version"] == torch.__version__
    assert second["time"].startswith(time.strftime("%Y-", time.gmtime()))
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


@pytest.mark.parametrize("text", ["", "{", "3", '[1, {"num_updates": 5}]'])
def test_a_damaged_file_loses_only_what_is_damaged(tmp_path, text):
    (tmp_path / "environment.json").write_text(text)
    Starts(tmp_path).begin(7)
    assert [start["num_updates"] for start in read_starts(tmp_path / "environment.json")][-1] == 7


def test_a_full_disk_costs_a_warning(tmp_path, monkeypatch, caplog):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(starts.os, "replace", full)
    Starts(tmp_path).begin(0)
    assert "environment.json: not written (No space left on device)" in caplog.text


def test_what_a_killed_process_left_beside_the_starts_is_removed_and_a_link_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("[]")
    (tmp_path / "environment.json").symlink_to(victim)
    (tmp_path / "environment.json.tmp-old").write_text("half")
    Starts(tmp_path).begin(0)
    assert victim.read_text() == "[]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["environment.json", "victim"]
    assert len(read_starts(tmp_path / "environment.json")) == 1


def test_starts_that_are_a_pipe_or_nested_without_end_are_none(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "deep").write_text("[" * 100_000)
    assert read_starts(tmp_path / "pipe") == read_starts(tmp_path / "deep") == []


def test_deep_facts_of_a_file_are_cut():
    value = ["end"]
    for _ in range(900):
        value = [value]
    assert list(facts({"name": value})) == [("name", "...")]


def test_a_user_without_a_home_folder_has_an_environment(monkeypatch):
    for name in ("HOME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert list(environment.lines(environment.collect()))


def test_another_processs_start_is_not_ended(tmp_path):
    (tmp_path / "environment.json").write_text(json.dumps([{"pid": -5, "num_updates": 0}]))
    Starts(tmp_path).end(9, "reason")
    assert read_starts(tmp_path / "environment.json") == [{"pid": -5, "num_updates": 0}]
