"""scripts/gpu_check.sh: each step is reported and kept, whatever fails or ends it; all of them run on a CPU, too."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def checkout(tmp_path):
    """The scripts alone, so that nothing is written into the real folder."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "gpu_check.sh").write_bytes((ROOT / "scripts" / "gpu_check.sh").read_bytes())
    return tmp_path


def python_that(checkout, what):
    python = checkout / "python"
    python.write_text(f'#!/bin/sh\ncase "$1" in -c) exit 0 ;; {what} *) echo ran "$@" ;; esac\n')
    python.chmod(0o755)
    return ["bash", checkout / "scripts" / "gpu_check.sh", "--device", "cpu", "--quick", "--python", python]


def names_in(archive):
    with tarfile.open(archive) as packed:
        return set(packed.getnames())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--nonsense"], 2, "unknown argument --nonsense"),
        (["--part", "everything"], 2, "--part everything is none of smoke, train, generate, tests"),
        (["--device", "nowhere", "--python", "/bin/false"], 1, "device: exit code 1"),
    ],
)
def test_what_is_wrong_is_said(checkout, arguments, code, message):
    done = subprocess.run(
        ["bash", checkout / "scripts" / "gpu_check.sh", *arguments],
        env={**os.environ, "OUT": "out"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code
    assert message in done.stderr + done.stdout


def test_a_step_that_fails_is_reported_and_the_others_continue(checkout):
    done = subprocess.run(
        python_that(checkout, "-m) exit 3 ;;"), env={**os.environ, "OUT": "out"}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "1 of the steps failed" in done.stdout
    assert "tests/tests (exit code 3)" in done.stdout
    summary = (checkout / "out" / "summary.txt").read_text()
    assert summary == done.stdout
    for step in ("smoke/first-updates", "train/forms", "generate/prompts"):
        assert f"== {step}: exit code 0" in summary
        assert f"gpu_check/{step}.txt" in names_in(checkout / "out" / "all.tgz")


def test_only_the_named_part_is_run(checkout):
    command = [*python_that(checkout, ""), "--part", "generate"]
    done = subprocess.run(command, env={**os.environ, "OUT": "out"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert [line.split("/")[0] for line in done.stdout.splitlines() if line.startswith("== ") and "/" in line] == [
        "== generate"
    ] * 5


@pytest.mark.parametrize("more", [[], ["--quick"]], ids=["whole", "quick"])
def test_each_benchmark_takes_what_it_is_given_and_the_default_attention_is_compared(checkout, monkeypatch, more):
    command = [argument for argument in python_that(checkout, "") if argument not in ("--device", "cpu", "--quick")]
    subprocess.run([*command, *more], env={**os.environ, "OUT": "out"}, capture_output=True)
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))
    found = set()
    for log in (checkout / "build" / "gpu_check").rglob("*.txt"):
        for line in log.read_text().splitlines():
            if (words := line.split())[1:2] and words[1].startswith("scripts/benchmark/"):
                monkeypatch.setattr(sys, "argv", words[1:])
                program = importlib.import_module(Path(words[1]).stem)
                options = program.parse()
                assert options.device == "cuda"
                found |= set(options.attention) if program.__name__ == "train_step" else set()
    assert found >= {"auto", "sdpa", "varlen", "flex"}


def test_what_was_measured_is_there_when_the_script_is_stopped(checkout):
    command = [*python_that(checkout, "scripts/benchmark/train_step.py) sleep 60 ;;"), "--part", "smoke"]
    running = subprocess.Popen(command, env={**os.environ, "OUT": "out"}, stdout=subprocess.PIPE, text=True)
    log = checkout / "build" / "gpu_check" / "smoke" / "first-updates.txt"
    while not log.exists():
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 143
    assert "the script (stopped)" in output
    assert {"gpu_check/smoke/rates.txt", "gpu_check/smoke/first-updates.txt"} <= names_in(checkout / "out" / "all.tgz")


def test_the_summary_is_whole_when_nobody_reads_the_output_any_more(checkout):
    command = [*python_that(checkout, ""), "--part", "generate"]
    running = subprocess.Popen(command, env={**os.environ, "OUT": "out"}, stdout=subprocess.PIPE)
    running.stdout.close()
    assert running.wait(timeout=60) == 0
    summary = (checkout / "out" / "summary.txt").read_text()
    assert "ran scripts/benchmark/generate.py" in summary
    assert "all steps passed" in summary


@pytest.mark.slow
@pytest.mark.parametrize("part", ["smoke", "train", "generate", "tests"])
def test_all_steps_run_on_a_cpu(tmp_path, part):
    command = ["bash", "scripts/gpu_check.sh", "--part", part, "--device", "cpu", "--quick", "--minutes", "30"]
    done = subprocess.run(
        [*command, "--python", sys.executable],
        cwd=ROOT,
        env={**os.environ, "OUT": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "all.tgz") as packed:
        files = {name: packed.extractfile(name) for name in packed.getnames() if f"/{part}/" in name}
        figures = {Path(name).stem: json.load(file) for name, file in files.items() if name.endswith(".json")}
    if part == "smoke":
        assert figures["rates"]["rates"]["matrix_tflops_bf16"] > 0
    elif part == "train":
        assert all("error" not in row for size in figures["sizes"]["sizes"] for row in size["ways"])
        assert {size["batch_size"] for size in figures["sizes"]["sizes"]} == {1, 4}
    elif part == "generate":
        assert {row["prompts"] for row in figures["prompts"]["steps"]["ways"]} == {1, 4, 8}
        assert len(figures["cold"]["cold"]["rows"]) == 3
    else:
        assert "passed" in (tmp_path / "summary.txt").read_text()
