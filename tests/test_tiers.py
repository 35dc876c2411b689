"""`scripts/test.sh` leaves out the slow tests, unless it is told otherwise."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize(
    ("arguments", "passed_on"),
    [
        ([], ["-m", "not slow"]),
        (["-q", "-k", "order"], ["-m", "not slow", "-q", "-k", "order"]),
        (["--all", "-q"], ["-q"]),
        (["-m", "slow"], ["-m", "slow"]),
        (["tests/data"], ["tests/data"]),
        (["-q", "tests/test_docs.py::test_code_blocks_run"], ["-q", "tests/test_docs.py::test_code_blocks_run"]),
    ],
)
def test_what_is_named_is_run_and_else_what_is_not_slow(tmp_path, arguments, passed_on):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "FTK_NO_INSTALL": "1"}
    command = ["bash", ROOT / "scripts" / "test.sh", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-len(passed_on) - 2 :] == ["--durations", "10", *passed_on]


def test_a_test_without_a_declared_mark_is_an_error(pytestconfig):
    assert "--strict-markers" in pytestconfig.getini("addopts")
    assert any(line.startswith("slow:") for line in pytestconfig.getini("markers"))
