"""The settings on which ftk-validate's figures depend: they are shown, and those of the task can be given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ftk.hub import load_model
from ftk.registry import CRITERIONS
from ftk_cli import validate
from tests.small_run import forget_plugin, save_model

PLUGIN = str(Path(__file__).resolve().parents[2] / "examples" / "plugin" / "criterion.py")


@pytest.fixture
def plugin():
    """Its criterion is forgotten afterwards."""
    yield
    forget_plugin("criterion", CRITERIONS, "focal_loss")


def figures(ask, *arguments):
    _, out, _ = ask(validate.main, "data-bin", *arguments, "--output-format", "json", "--device", "cpu", code=0)
    return json.loads(out[0])


def test_options_of_the_task_can_be_given_and_are_shown(ask):
    trained = figures(ask, "--path", "run")
    assert trained["settings"]["task"]["seq_length"] == 48
    assert (trained["settings"]["seed"], trained["settings"]["precision"]) == (1, "fp32")
    given = figures(ask, "--path", "run", "--seq-length", "64", "--seed", "3", "--label-smoothing", "0.1")
    assert given["settings"]["task"] == {**trained["settings"]["task"], "seq_length": 64}
    assert (given["settings"]["seed"], given["settings"]["criterion"]["label_smoothing"]) == (3, 0.1)
    assert given["loss"] != trained["loss"]
    assert "nll_loss" in given
    _, out, _ = ask(validate.main, "data-bin", "--path", "run", "--seq-length", "64", "--no-block-positions")
    assert "task       glm_blank, seq_length 64, block_positions false" in out
    assert "seed       1" in out


def test_the_same_weights_have_the_same_loss_with_the_same_settings(ask, place):
    """A checkpoint of another program says nothing about its task."""
    if not (place / "bare_config").exists():
        save_model(place / "bare_config", load_model(place / "run"), place / "data-bin" / "tokenizer")
    _, _, err = ask(validate.main, "data-bin", "--path", "bare_config", "--device", "cpu", code=2)
    assert err == [
        "ftk-validate: --seq-length 512 (the task's default) is beyond the model's 128 positions; lower --seq-length "
        "or raise --max-positions"
    ]
    flags = ("--seq-length", "48", "--path")
    assert figures(ask, *flags, "bare_config")["loss"] == figures(ask, *flags, "run")["loss"]


def test_another_criterion_than_the_trained_one_is_computed_a_plugins_too(ask, place, tmp_path, plugin):
    usual = figures(ask, "--path", "run")
    theirs = figures(ask, "--path", "run", "--user-dir", PLUGIN, "--criterion", "focal_loss", "--focus", "1")
    assert theirs["settings"]["criterion"] == {"_name": "focal_loss", "focus": 1.0}
    assert theirs["loss"] < usual["loss"]
    run, options = tmp_path / "run", {"_name": "focal_loss", "focus": 0.5}  # of a run that was trained with it
    sections = {"task": {"_name": "glm_blank", "seq_length": 48}, "criterion": options}
    save_model(run, load_model(place / "run"), place / "data-bin" / "tokenizer", **sections)
    assert figures(ask, "--path", str(run), "--user-dir", PLUGIN)["settings"]["criterion"] == options
    assert figures(ask, "--path", str(run), "--criterion", "cross_entropy")["loss"] == usual["loss"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--seq-length", "2"], "--seq-length is 2; it must be at least 8"),
        (["--seq-lenth", "64"], "unknown flag --seq-lenth; did you mean --seq-length?"),
        (["--context-mask-range", "5"], "--context-mask-range has no effect without --context-mask-ratio"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--criterion", "z_los"], "unknown criterion 'z_los'; there are: "),
        (["--criterion", "preference"], "--criterion preference is for --task preference, not for glm_blank; leave it"),
    ],
)
def test_wrong_settings_are_one_line(ask, flags, message):
    code, out, err = ask(validate.main, "data-bin", "--path", "run", *flags)
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(f"ftk-validate: {message}")


def test_help_shows_the_options_of_the_task_with_the_values_of_the_checkpoint(ask, capsys):
    with pytest.raises(SystemExit):
        ask(validate.main, "data-bin", "--path", "run", "--help", "all")
    text = " ".join(capsys.readouterr().out.split())
    assert "task: glm_blank" in text
    assert "default: 48)" in text
