"""The example plugin trains end to end: dataset, task, model, criterion and optimizer are all the plugin's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.records import records_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plugin"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, data_bin, command) -> Path:
    """The example as its docstring says, in a worker process too, by a relative --user-dir."""
    out = tmp_path_factory.mktemp("run")
    done = command(
        "ftk-train",
        data_bin.parent,
        "--user-dir",
        EXAMPLE.name,
        "--dataset",
        "text_lines",
        "--tokenizer-folder",
        data_bin,
        "--task",
        "next_token",
        "--window",
        16,
        "--arch",
        "lstm_tiny",
        "--criterion",
        "focal_loss",
        "--optimizer",
        "sign_sgd",
        "--lr-scheduler",
        "constant",
        "--lr",
        "3e-3",
        "--max-update",
        40,
        "--num-workers",
        1,
        "--log-format",
        "json",
        "--log-interval",
        10,
        "--save-dir",
        out,
        cwd=EXAMPLE.parent,
        code=0,
    )
    losses = [row["nll_loss"] for row in map(json.loads, done.stdout.splitlines()) if row["event"] == "train"]
    assert losses[-1] < losses[0] - 0.3
    return out


def test_the_parts_are_in_the_saved_configuration(run_folder):
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    assert [config[key]["_name"] for key in ("dataset", "task", "criterion", "optimizer")] == [
        "text_lines",
        "next_token",
        "focal_loss",
        "sign_sgd",
    ]
    assert config["model"]["arch"] == "lstm_tiny"
    assert Path(config["common"]["user_dir"]) == EXAMPLE


def test_a_checkpoint_does_not_import_its_plugin_by_itself(run_folder, data_bin, command):
    done = command("ftk-validate", data_bin.parent, "--path", run_folder, code=2)
    assert f"made with the plugin {str(EXAMPLE)!r}; give it with --user-dir" in done.stderr


def test_a_run_that_is_continued_without_its_plugin_says_which_it_was(run_folder, data_bin, command):
    continued = ("ftk-train", data_bin.parent, "--arch", "lstm_tiny", "--save-dir", run_folder, "--lr", "high")
    done = command(*continued, code=2)
    assert f"made with the plugin {str(EXAMPLE)!r}; give it with --user-dir" in done.stderr
    assert "made with the plugin" not in command(*continued, "--user-dir", EXAMPLE, code=2).stderr


def test_the_checkpoint_works_with_the_plugin_in_another_place(run_folder, data_bin, tmp_path, command):
    shutil.copytree(EXAMPLE, tmp_path / "plugin")
    done = command(
        "ftk-validate",
        data_bin.parent,
        "--path",
        run_folder,
        "--user-dir",
        tmp_path / "plugin",
        "--output-format",
        "json",
        code=0,
    )
    *_, last = records_of(run_folder, "valid")
    assert json.loads(done.stdout)["loss"] == pytest.approx(last["loss"], rel=1e-5)


def test_its_options_are_in_help(command):
    done = command(
        "ftk-train", "--user-dir", EXAMPLE, "--task", "next_token", "--criterion", "focal_loss", "--help", "all", code=0
    )
    assert "--window N" in done.stdout
    assert "--focus X" in done.stdout
    assert "--bert-prob" not in done.stdout


def test_a_dry_run_says_why_memory_of_its_model_is_not_estimated(data_bin, command):
    flags = ("--user-dir", EXAMPLE, "--arch", "lstm_tiny", "--max-update", 1, "--dry-run")
    done = command("ftk-train", data_bin, *flags, code=0)
    assert "not estimated (LSTM cannot be planned: it has no num_attention_heads; " in done.stdout


def test_the_page_on_plugins_shows_its_task_and_model():
    page = (EXAMPLE.parents[1] / "docs" / "plugins.md").read_text(encoding="utf-8")
    assert f"# my_lm/__init__.py\n{(EXAMPLE / 'language_model.py').read_text(encoding='utf-8')}```" in page
