"""Kills a training run with SIGKILL at many random moments, restarts it each time, and compares its end with that of
an undisturbed run: parameters, optimizer, moving average, state and figures must be equal bit for bit.

    python scripts/kill_test.py DATA --kills 40 [--updates 160] [--seed 1] [--fresh] [--num-workers 1]

DATA is a folder written by ftk-preprocess. Each attempt is the same ftk-train command in a process of its own: a fork
of one that has imported PyTorch already, or, with --fresh, a new Python. Exit code 0 if everything was equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

ATTEMPT_SECONDS = 300.0
MOMENTS = ("at the start", "between saves", "while writing")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--updates", type=int, default=160)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="a new Python for each attempt, no fork")
    parser.add_argument("--keep", type=Path, help="keep both run folders here")
    options = parser.parse_args()
    folder = options.keep or Path(tempfile.mkdtemp(prefix="ftk-kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return test(options, folder)
    finally:
        if options.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def test(options: argparse.Namespace, folder: Path) -> int:
    """The undisturbed run, the killed one, the comparison; prints what was done as one line of JSON."""
    whole, killed = folder / "whole", folder / "killed"
    if wait_for(start(options, whole, folder / "whole.log")) != 0:
        print((folder / "whole.log").read_text(), file=sys.stderr)
        return 1
    moments = random.Random(options.seed)
    kills: Counter[str] = Counter()
    found: list[str] = []
    began = time.monotonic()
    while True:
        number = sum(kills.values())
        process = start(options, killed, folder / "killed.log")
        if number < options.kills:
            moment = MOMENTS[number % len(MOMENTS)]
            furthest = options.updates * (number + 1) // (options.kills + 1)
            if wait_for_moment(process, killed, moment, moments, furthest):
                os.kill(process, signal.SIGKILL)
        code = wait_for(process)
        if code == -signal.SIGKILL:
            kills[moment] += 1
            found += sorted(path.name for path in killed.glob("*.tmp-*"))
        elif code == 0:
            break
        else:
            print((folder / "killed.log").read_text()[-3000:], file=sys.stderr)
            print(f"attempt {number + 1} ended with {code}", file=sys.stderr)
            return 1
    differences = compare(whole, killed)
    summary = {
        "kills": sum(kills.values()),
        "moments": dict(kills),
        "half_written_found": len(found),
        "updates": options.updates,
        "seconds": round(time.monotonic() - began, 1),
        "differences": differences,
    }
    print(json.dumps(summary))
    return 1 if differences or sum(kills.values()) < options.kills else 0


def start(options: argparse.Namespace, run: Path, log: Path) -> int:
    """Begins the training command; returns its process id."""
    arguments = [str(options.data), "--arch", "glm_tiny", "--num-layers", "2", "--seq-length", "48", "--dropout", "0.1"]
    arguments += ["--batch-size", "2", "--update-freq", "2", "--lr", "1e-3", "--seed", "7", "--device", "cpu"]
    arguments += ["--max-update", str(options.updates), "--save-interval-updates", "1", "--keep-last", "3"]
    arguments += ["--validate-interval-updates", "20", "--max-valid-samples", "4", "--log-interval", "3"]
    arguments += ["--log-format", "json", "--num-workers", str(options.num_workers), "--num-threads", "1"]
    arguments += ["--ema-decay", "0.9", "--save-dir", str(run)]
    if options.fresh:
        command = [sys.executable, "-c", "import sys; from ftk_cli.train import main; sys.exit(main())", *arguments]
        with open(log, "w") as stream:
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            return subprocess.Popen(command, stdout=stream, stderr=stream, env=environment).pid
    import ftk.trainer.trainer  # noqa: F401  (so that no attempt has to import PyTorch)
    from ftk_cli.train import main as train

    process = os.fork()
    if process > 0:
        return process
    code = 70
    try:
        stream = open(log, "w")  # noqa: SIM115 (the process ends with it)
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        code = train(arguments)
        sys.stdout.flush()
    finally:
        os._exit(code)


def wait_for_moment(process: int, run: Path, moment: str, moments: random.Random, furthest: int) -> bool:
    """Sleeps until the process must be killed, at the latest when it has saved `furthest` updates: the faster the
    machine, the earlier that is, and each kill comes before the run is through. False if the process has ended before.
    """
    before = newest(run)
    deadline = time.monotonic() + ATTEMPT_SECONDS

    def wait(seconds: float, until: Callable[[], bool]) -> None:
        end = min(time.monotonic() + seconds, deadline)
        while time.monotonic() < end and not until() and newest(run) < furthest and is_running(process):
            time.sleep(0.002)

    if moment == "at the start":
        wait(moments.uniform(0.0, 1.0), lambda: False)
        return is_running(process)
    wait(ATTEMPT_SECONDS, lambda: newest(run) > before)  # it got on by at least one checkpoint
    if moment == "between saves":
        wait(moments.uniform(0.0, 0.2), lambda: False)
    else:
        wait(ATTEMPT_SECONDS, lambda: any(run.glob("checkpoint_*.tmp-*")))
        time.sleep(moments.uniform(0.0, 0.005))
    return is_running(process)


def is_running(process: int) -> bool:
    """Whether a child has not ended yet; it is not collected."""
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def wait_for(process: int) -> int:
    """The exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def newest(run: Path) -> int:
    """The highest N of `checkpoint_N`."""
    numbers = (path.name.rpartition("_")[2] for path in run.glob("checkpoint_*"))
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def compare(whole: Path, killed: Path) -> list[str]:
    """What is not equal between the ends of two runs."""
    differences = []
    for part in ("model", "optimizer", "ema"):
        contents = [hashes(run / "checkpoint_last" / part) for run in (whole, killed)]
        if contents[0] != contents[1] or len(contents[0]) != 2:
            differences.append(part)
    states = [json.loads((run / "checkpoint_last" / "trainer.json").read_text()) for run in (whole, killed)]
    differences += [key for key in states[0] if key not in ("seconds", "scores") and states[0][key] != states[1][key]]
    if figures(whole) != figures(killed):
        differences.append("metrics.jsonl")
    return differences


def hashes(folder: Path) -> list[str]:
    """Of the files in a folder, in the order of their names."""
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())]


def figures(run: Path) -> list[dict[str, Any]]:
    """The records of a run without what depends on the clock."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not is_timed(key)} for record in records]


def is_timed(key: str) -> bool:
    """Whether a figure depends on the clock or on the machine's memory."""
    shares = key.endswith("_share") and key != "clip_share"
    return shares or key.endswith("seconds") or "_per_second" in key or "mfu" in key or "flop" in key or "memory" in key


if __name__ == "__main__":
    raise SystemExit(main())
