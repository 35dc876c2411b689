"""SIGKILL at dozens of random moments; `scripts/kill_test.py` does it, and more of it by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_test.py"


@pytest.mark.parametrize(("kills", "num_workers"), [(30, 0), (6, 1)])
def test_a_run_killed_at_random_moments_ends_with_the_same_bits(data_bin, tmp_path, kills, num_workers):
    arguments = ["--kills", str(kills), "--updates", str(3 * kills), "--num-workers", str(num_workers)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(data_bin), *arguments, "--keep", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["differences"] == []
    assert summary["kills"] == kills
    if kills >= 30:  # of a few, none may have come while a checkpoint was being written
        assert summary["moments"]["while writing"] > 0
        assert summary["half_written_found"] > 0
