"""What several benchmarks need: the test data, a command in a process of its own, the best of rounds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TEST_DATA = Path(os.environ.get("FTK_TEST_DATA", Path(__file__).resolve().parents[3] / "shared")) / "data"


def run_command(name: str, *arguments: object, **environment: str) -> None:
    """Run `ftk NAME ARGUMENTS`, as a user does; the benchmark ends with what it says where it fails."""
    command = [sys.executable, "-m", "ftk_cli", name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")


def best_of(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of the best round of each way; they take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - started)
    return best
