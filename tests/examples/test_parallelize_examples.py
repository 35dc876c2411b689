"""The examples of ftk.parallelize run, on two processes as on one, and are as short as they say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "parallelize"


def losses_of(name: str, processes: int, unwanted: str = "") -> list[float]:
    """The losses that an example prints; `unwanted` must not be on its standard error."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLE / name)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    assert not unwanted or unwanted not in done.stderr
    return [float(loss) for loss in re.findall(r"loss ([0-9.]+)", done.stdout)]


def test_two_processes_learn_as_one():
    alone, together = losses_of("any_module.py", 1), losses_of("any_module.py", 2)
    assert alone[-1] < 0.9 * alone[0]
    assert together == pytest.approx(alone, abs=2e-4)


@pytest.mark.slow
def test_a_cut_gpt2_learns():
    pytest.importorskip("transformers")
    losses = losses_of("gpt2.py", 2, unwanted="token_id")
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
