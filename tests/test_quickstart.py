"""The quickstart, from text to filled blanks, with a few updates; and interrupted in the middle."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_until

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ["bash", str(ROOT / "scripts" / "quickstart.sh")]


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """The environment that runs the tests stands in for the one that the script would make."""
    bin_folder = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "FTK_QUICKSTART_DIR": str(tmp_path / "out"),
        "FTK_QUICKSTART_UPDATES": "8",
        "FTK_NO_INSTALL": "1",
        "PYTHONPATH": str(ROOT),
    }


@pytest.mark.slow
def test_it_goes_all_the_way_and_twice(environment, tmp_path):
    for _ in range(2):
        done = subprocess.run(SCRIPT, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert re.search(r"^loss +\d+\.\d+$", done.stdout, re.MULTILINE)
    assert re.search(r"^unigram_loss +\d+\.\d+$", done.stdout, re.MULTILINE)
    blanks = (tmp_path / "out" / "text" / "blanks.txt").read_text().splitlines()
    for line in blanks:
        assert f"> {line}" in done.stdout
    assert done.stdout.count("  p = ") == sum(line.count("[MASK]") for line in blanks)
    assert (tmp_path / "out" / "run" / "checkpoint_best").is_dir()


@pytest.mark.slow
def test_the_model_learns_more_than_how_often_tokens_come(environment):
    environment["FTK_QUICKSTART_UPDATES"] = "700"
    done = subprocess.run(SCRIPT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    figures = dict(re.findall(r"^(loss|unigram_loss) +(\d+\.\d+)$", done.stdout, re.MULTILINE))
    assert float(figures["loss"]) < float(figures["unigram_loss"]) - 0.3


def test_a_folder_of_the_users_is_not_removed(environment, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("mine")
    done = subprocess.run(SCRIPT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (tmp_path / "out" / "precious.txt").read_text() == "mine"


@pytest.mark.slow
def test_own_text_in_chinese(environment, test_data, tmp_path):
    own = test_data / "chinese" / "valid.jsonl"
    done = subprocess.run([*SCRIPT, str(own)], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  p = ") == (tmp_path / "out" / "text" / "blanks.txt").read_text().count("[MASK]")


def test_too_little_text_is_said(environment, tmp_path):
    (tmp_path / "mine.txt").write_text("One line.\n")
    own = str(tmp_path / "mine.txt")
    done = subprocess.run([*SCRIPT, own], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "at least 10 are needed" in done.stderr


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_broken(environment, tmp_path):
    environment["FTK_QUICKSTART_UPDATES"] = "100000"
    process = subprocess.Popen(
        SCRIPT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    wait_until((tmp_path / "out" / "run" / "metrics.jsonl").exists, process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "Traceback" not in errors
    assert not list((tmp_path / "out").rglob("*.tmp*"))
