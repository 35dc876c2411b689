"""ftk-hydra-train takes Hydra's own flags wherever they stand, and imports nothing that a file names."""

from __future__ import annotations

import sys

import pytest

from ftk.errors import UserError
from ftk_cli.hydra_train import _check_recipe, _in_order, _read, main
from ftk_cli.train import main as train_main

QUIET = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
FLAGS = {
    "-m": "--multirun",
    "--multirun": "--multirun",
    "-r": "--run",
    "--cfg job": "--cfg=job",
    "--cfg=hydra": "--cfg=hydra",
    "-c all": "--cfg=all",
    "--info": "--info=all",
    "-i": "--info=all",
    "--info searchpath": "--info=searchpath",
    "--info=defaults-tree": "--info=defaults-tree",
    "--package task": "--package=task",
    "-p task": "--package=task",
    "--shell-completion": "--shell-completion",
    "-sc": "--shell-completion",
    "--config-dir some": "--config-dir=some",
    "-cd=some": "--config-dir=some",
    "--config-path some": "--config-path=some",
    "--config-name glm_tiny": "--config-name=glm_tiny",
    "-cn glm_tiny": "--config-name=glm_tiny",
}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("flag", FLAGS)
def test_a_flag_works_before_between_and_behind_overrides(flag, place):
    argv = ["dataset.data=d", "~optimizer.lr"]
    argv[place:place] = flag.split()
    assert _in_order(_read(argv)) == [FLAGS[flag], "dataset.data=d", "~optimizer.lr", *QUIET]


def test_two_flags_around_an_override_and_a_logging_of_ones_own():
    argv = ["--cfg", "job", "hydra/job_logging=default", "--resolve", "optimizer.lr=1", "-p", "task"]
    assert sorted(_in_order(_read(argv))[:3]) == ["--cfg=job", "--package=task", "--resolve"]
    assert _in_order(_read(argv))[3:] == ["hydra/job_logging=default", "optimizer.lr=1", QUIET[1]]
    assert _in_order(_read(["a=b", "--hydra-help"])) == ["--hydra-help", *QUIET]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["a=b", "--nothing"], "unrecognized arguments: --nothing"),
        (["--config-nam", "glm_tiny"], "unrecognized arguments: --config-nam"),
        (["a=b", "--cfg", "jab"], "invalid choice: 'jab'"),
        (["a=b", "--cfg"], "expected one argument"),
        (["--resolve"], "--resolve goes with --cfg"),
        (["-m", "a=b", "--info"], "give one of --run, --multirun, --cfg, --info and --shell-completion"),
        (["--experimental-rerun", "x.pickle"], "--experimental-rerun is left out: it unpickles a file"),
        (["optimizer.lr=1e-3,1e-400"], "1e-400 is too small to differ from 0"),
        (["optimizer.lr=1"], "--config-name is missing; recipes: glm_"),
        (["--max-update", "3"], "without dashes: training.max_update=VALUE"),
        (["--config-name", "glm_tin"], "--config-name glm_tin: there is no such file and no such recipe"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_mistake_is_one_line(argv, message, capsys):
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("flag", "said"), [("--cfg job", "\n  hidden_size: 64\n"), ("--info", "\nDefaults Tree\n")])
def test_what_a_run_would_be_is_printed(command, flag, said):
    done = command("ftk-hydra-train", "dataset.data=d", *flag.split(), "--config-name=glm_tiny", code=0)
    assert said in done.stdout


@pytest.mark.parametrize("argv", [["-h"], ["dataset.data=d", "--help"], ["-m", "-h"]])
def test_help_is_ours_in_any_place(argv, capsys):
    assert main(argv) == 0
    assert capsys.readouterr().out.startswith("usage: ftk-hydra-train")


def test_what_a_file_names_is_not_imported_unless_it_is_given(tmp_path, capsys):
    marker = tmp_path / "imported"
    plugin, recipe = tmp_path / "hydra_stranger.py", tmp_path / "stranger.yaml"
    plugin.write_text(f"from pathlib import Path\nPath({str(marker)!r}).touch()\n")
    recipe.write_text(f"defaults: [base, {{task: nobody_knows}}, _self_]\ncommon: {{user_dir: {plugin}}}\n")
    own = ["--config-name", "stranger", "--config-dir", str(tmp_path)]
    for more in ([], ["--cfg", "job"], ["-m"]):
        assert main([*own, *more]) == 2
        error = capsys.readouterr().err
        assert f"stranger.yaml names the plugin '{plugin}'" in error
        assert "give common.user_dir=PATH to import it, or common.user_dir=none to go without" in error
    assert not marker.exists()
    _check_recipe(_read(own), True)
    for text in ("hydra: {callbacks: {a: {_target_: os.getcwd}}}", "a: {b: [{_target_: '${c}'}]}", "[{_target_: a}]"):
        (tmp_path / "other.yaml").write_text(text)
        with pytest.raises(UserError, match=r"other.yaml: hydra must not call"):
            _check_recipe(_read(own), True)
    for text in ("hydra: {sweeper: {_target_: hydra_plugins.hydra_optuna_sweeper.Sweeper}}", "[optimizer.lr=1]", ""):
        (tmp_path / "other.yaml").write_text(text)  # the list is Hydra's record of a run's overrides
        _check_recipe(_read(own), True)


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("dataloader.batch_sise=4", "did you mean dataloader.batch_size?"),
        ("optimizer.weight_decai=1", "did you mean optimizer.weight_decay?"),
        ("optimzer.lr=1", "did you mean optimizer.lr?"),
        ("optimzer=muon", "did you mean optimizer?"),
        ("training.max_valid_samples=16", "did you mean dataloader.max_valid_samples?"),
        ("lr=1e-3", "did you mean optimizer.lr?"),
        ("optimizer.zzzz=1", "ftk-hydra-train --config-name glm_tiny --cfg job shows all keys"),
    ],
)
def test_a_key_that_does_not_exist_is_answered_with_one_that_is_near(override, hint, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the command changes, with this variable
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["--config-name", "glm_tiny", "dataset.data=d", override]) == 2
    assert capsys.readouterr().err == f"ftk-hydra-train: unknown key {override.split('=')[0]}; {hint}\n"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["task.pack=true"], "the recipe does not set task.pack; add it: +task.pack=VALUE"),
        (["adapter=lora"], "the recipe does not choose adapter; add it: +adapter._name=NAME"),
        (
            ["-m", "optimizer.lr=1,2"],
            "each run of a sweep needs a folder of its own; give it a name with what is swept: ",
        ),
    ],
)
def test_a_key_that_the_recipe_has_not_or_a_folder_for_all_runs_is_answered(overrides, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["--config-name", "finetune/sft", "dataset.data=d", *overrides]) == 2
    assert f"ftk-hydra-train: {said}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lr=high", "optimizer.lr is 'high'; it must be a finite number"),
        ("training.max_update=1", "d: no such data folder; make one with ftk-preprocess --destdir d"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_folder(override, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert main(["--config-name", "glm_tiny", "dataset.data=d", override]) == 2
    assert capsys.readouterr().err == f"ftk-hydra-train: {message}\n"
    assert not list(tmp_path.iterdir())


RECIPE = "defaults: [base, {{task: glm_blank}}, {{model: glm_tiny}}, {{optimizer: adamw}}, {}_self_]\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: {base: 1}\n", "defaults must be a list (got mapping)"),
        (RECIPE.format("1, "), "Unsupported type in defaults : int"),
        (RECIPE.format("{1: 2}, "), "its list of defaults must hold names, or pairs of a group and a name"),
        (RECIPE.format("own, "), "its list of defaults leads back to itself"),
        (RECIPE.format("") + "common: {seed: 1, seed: 2}\n", "found duplicate key seed"),
    ],
)
def test_a_recipe_that_cannot_be_composed_is_one_line(text, message, capsys, monkeypatch, tmp_path):
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    for command, arguments in (
        (train_main, ["d", "--config", "own.yaml"]),
        (main, ["--config-dir", ".", "--config-name", "own", "dataset.data=d"]),
    ):
        assert command(arguments) == 2
        said = capsys.readouterr().err
        assert message in said
        assert len(said.splitlines()) == 1
