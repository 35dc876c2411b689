"""scripts/attack.py: a few cases of each subject have no fault, and what is wrong with a command is found."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks at processes as Linux shows them"),
]


def test_some_cases_of_each_subject_have_no_fault():
    command = [sys.executable, str(SCRIPTS / "attack.py"), "--sample=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 failures" in done.stdout.splitlines()[-1]


@pytest.fixture
def harness(monkeypatch) -> ModuleType:
    """The harness, without any cases."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from attacks import harness

    monkeypatch.setattr(harness, "CASES", [])
    return harness


BAD = {
    "hangs": "does not end within 1 seconds",
    "fails": "a traceback",
    "is silent": "says 0 lines",
    "talks": "says 20 lines",
    "steers the terminal": "control characters",
    "succeeds": "exit code 0 instead of 2",
    "leaves a process": "leaves processes running",
    "changes a file": "changes a file that is not its own",
    "takes memory": "MB of memory",
    "says something else": "does not say 'the file'",
}


def misbehave(how, place):
    """A command that does something wrong, in place of a main function; returns its exit code."""
    if how == "hangs":
        time.sleep(600)
    if how == "fails":
        os.write(2, b"Traceback (most recent call last):\n")
    if how == "leaves a process" and os.fork() == 0:
        time.sleep(600)
    if how == "changes a file":
        place.victim.write_text("")
    if how == "takes memory":
        bytearray(os.urandom(1 << 20) * 1600)
    if how == "steers the terminal":
        os.write(2, b"\x1b[2J\n")
    if how != "is silent":
        os.write(2, b"ftk-x: no\n" * (20 if how == "talks" else 1))
    return 0 if how == "succeeds" else 2


def test_each_fault_is_found_and_a_good_command_has_none(harness, tmp_path, monkeypatch):
    for how in ("is good", *BAD):
        options = {"seconds": 1.0} if how == "hangs" else {"says": "the file"} if how == "says something else" else {}

        @harness.case(f"judge/{how}", **options)
        def _(place, how=how):
            monkeypatch.setattr("ftk_cli.env.main", lambda arguments: misbehave(how, place))
            return ["ftk-env"]

    faults = {case.name.split("/")[1]: fault for case, _, fault in harness.run_all(harness.CASES, tmp_path, 2)}
    assert faults.pop("is good") is None
    assert set(faults) == set(BAD)
    for how, expected in BAD.items():
        assert expected in faults[how]
