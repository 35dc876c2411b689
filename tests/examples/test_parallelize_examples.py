"""The examples of ftk.parallelize run, on two processes as on one, and are as short as they say."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import run_main
from tests.torchrun import torchrun

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parallelize"


def run_file(path: str) -> int:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update({name: value for name, value in alone.items() if name not in os.environ})
    runpy.run_path(path, run_name="__main__")
    return 0


def losses_in(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", text)]


def test_two_processes_learn_as_one():
    ended = [run_main(run_file, [str(EXAMPLE / "any_module.py")] * size) for size in (1, 2)]
    assert [one.returncode for one in ended] == [0, 0], ended
    alone, together = (losses_in(one.stdout) for one in ended)
    assert alone[-1] < 0.9 * alone[0]
    assert together == pytest.approx(alone, abs=2e-4)


@pytest.mark.slow
def test_a_cut_gpt2_learns():
    pytest.importorskip("transformers")
    done = torchrun(2, EXAMPLE / "gpt2.py")
    assert done.returncode == 0, done.stderr
    assert "token_id" not in done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) == 10
    assert losses[-1] < 0.9 * losses[0]


def test_without_transformers_gpt2_says_what_to_install(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ModuleNotFoundError('none', name='transformers')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(EXAMPLE.parents[1])])}
    command = [sys.executable, str(EXAMPLE / "gpt2.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 1
    assert done.stderr == "gpt2.py needs Hugging Face's package: pip install -c constraints.txt transformers\n"


@pytest.mark.parametrize("name", ["any_module.py", "gpt2.py"])
def test_the_training_code_has_about_twenty_lines(name):
    text = (EXAMPLE / name).read_text()
    body = text[text.index("dist.init_process_group") :]
    assert len([line for line in body.splitlines() if line.strip()]) <= 26
