"""The example that changes the training loop does so, from a --user-dir, in few lines."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import yaml

from tests.records import records_of

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "loop"
R_DROP = ("--criterion", "r_drop")


def losses_of(data_bin, save_dir, command, *flags, max_update=6, dropout=0.1):
    """Training records of a run, or of its continuation."""
    command(
        "ftk-train", data_bin, "--user-dir", EXAMPLE, "--arch", "glm_tiny", "--dropout", dropout,
        "--attention-dropout", dropout, "--embedding-dropout", dropout, "--seq-length", 48, "--batch-size", 4,
        "--lr", "3e-3", "--max-update", max_update, "--warmup-updates", 3, "--lr-scheduler", "constant",
        "--max-valid-samples", 4, "--log-interval", 1, "--log-format", "json", "--device", "cpu",
        "--save-dir", save_dir, *flags, code=0,
    )  # fmt: skip
    return records_of(save_dir, "train")


def code_lines(file: Path) -> int:
    """Lines with code: none of comments, docstrings or nothing."""
    text = file.read_text(encoding="utf-8")
    tree = ast.parse(text)
    documented = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    docstrings = [node.body[0] for node in documented if ast.get_docstring(node)]
    skipped = {number for node in docstrings for number in range(node.lineno, node.end_lineno + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in skipped for n, line in lines)


@pytest.mark.parametrize("name", ["gradient_noise.py", "r_drop.py"])
def test_each_change_of_the_loop_has_less_than_30_lines(name):
    assert code_lines(EXAMPLE / name) < 30


def test_two_passes_train_and_shows_its_divergence(tmp_path, data_bin, command):
    records = losses_of(data_bin, tmp_path / "run", command, *R_DROP, "--r-drop-weight", 4, max_update=25)
    assert records[-1]["nll_loss"] < records[0]["nll_loss"] - 0.5
    assert all(record["divergence"] > 0.0 for record in records)
    expected = [record["nll_loss"] + 2 * record["divergence"] for record in records]
    assert [record["loss"] for record in records] == pytest.approx(expected, rel=1e-5)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["criterion"]["r_drop_weight"] == 4.0


def test_without_dropout_it_is_the_plain_loss(tmp_path, data_bin, command):
    """Then both passes are the same, and the slow, obviously right version is ftk's own criterion."""
    ours = losses_of(data_bin, tmp_path / "ours", command, *R_DROP, dropout=0.0)
    plain = losses_of(data_bin, tmp_path / "plain", command, dropout=0.0)
    assert [r["loss"] for r in ours] == pytest.approx([r["loss"] for r in plain], rel=1e-4)
    assert all(record["divergence"] == pytest.approx(0.0, abs=1e-5) for record in ours)


def test_the_hook_acts_in_every_update_and_continues_exactly(tmp_path, data_bin, command):
    noise = ("--hooks", "gradient_noise eta=0.5")
    whole = losses_of(data_bin, tmp_path / "whole", command, *noise)
    plain = losses_of(data_bin, tmp_path / "plain", command)
    assert whole[0]["loss"] == plain[0]["loss"]  # the first noise comes after it
    assert all(noisy["gnorm"] > 5 * quiet["gnorm"] for noisy, quiet in zip(whole, plain, strict=True))
    losses_of(data_bin, tmp_path / "run", command, *noise, max_update=3)
    continued = losses_of(data_bin, tmp_path / "run", command, *noise)
    assert [record["loss"] for record in continued] == [record["loss"] for record in whole]
    assert [record["gnorm"] for record in continued] == [record["gnorm"] for record in whole]
