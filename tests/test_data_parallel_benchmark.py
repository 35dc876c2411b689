"""The benchmark of data parallel takes the same update in every way, and says so where one does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BENCHMARK = ROOT / "scripts" / "benchmark" / "data_parallel.py"
sys.path.insert(0, str(BENCHMARK.parent))

from data_parallel import all_ways, check_losses  # noqa: E402

from ftk.config.options import mistakes  # noqa: E402
from ftk.model_parallel.config import ParallelConfig  # noqa: E402


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, BENCHMARK, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_it_runs_and_its_losses_agree(tmp_path):
    done = run("--quick", "--ways", "DDP", "FSDP2 ZeRO-2", "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["ways"]
    assert [row["way"] for row in rows] == ["one process", "DDP", "FSDP2 ZeRO-2"]
    assert rows[0]["ratio"] == 1.0
    for row in rows:
        assert len(row["losses"]) == 3
        assert row["loss_distance"] < 1e-5
        assert row["tokens_per_second"] == pytest.approx(8 * 2 * 64 / row["seconds"])
        assert f"| {row['way']} | {row['processes']} |" in done.stdout


def test_every_way_is_a_configuration_of_ftk():
    for way in all_ways(2):
        assert mistakes(ParallelConfig(**way.parallel)) == []


def test_a_way_whose_losses_differ_fails():
    row = {"losses": [1.0, 2.1]}
    check_losses(row, [1.0, 2.0], "fp32")
    assert "losses differ" in row["error"]
    assert row["loss_distance"] == pytest.approx(0.05)
    good = {"losses": [1.0, 2.000001]}
    check_losses(good, [1.0, 2.0], "fp32")
    assert "error" not in good


def test_micro_batches_that_cannot_be_shared_are_refused():
    done = run("--micro-batches", 3)
    assert done.returncode == 2
    assert "--micro-batches 3 are not the same number for 2 processes" in done.stderr
