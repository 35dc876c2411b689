"""Two machines of a run, played by two torchrun agents on this one: one is lost and comes back, and the run continues.

    python scripts/elastic_test.py data-bin [--json]

Both agents meet by torchrun's own rendezvous (c10d) on the loopback. Once the run has a checkpoint, the second agent
and its process are killed as a machine is that loses power. The first one's process ends, its agent waits, the second
one is started again by the same command, and both continue from the last checkpoint. The records that the run leaves
are compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftk_cli.launch import free_port

ROOT = Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 300.0
SAME = ("num_updates", "loss", "gnorm", "lr", "epoch")  # of a record; the others are of the machine


@dataclass(frozen=True)
class Play:
    """What is played.

    Attributes:
        updates: of the run.
        saved_every: updates between checkpoints.
        killed_after: updates, and a checkpoint.
        lost_after_seconds: without a sign of life an agent is taken for lost.
        flags: more of the run.
    """

    updates: int = 40
    saved_every: int = 10
    killed_after: int = 23
    lost_after_seconds: int = 15  # torchrun's own
    flags: tuple[str, ...] = ()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder written by ftk-preprocess")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, machines(Path(options.data), Path(folder) / "whole", Play()) as start:
        first, second = two_agents(start)
        wait_for_end([first, second])
        undisturbed = records(Path(folder) / "whole")
        found = lose_and_return(Path(options.data), Path(folder) / "run", Play())
        disturbed = records(Path(folder) / "run")
    pairs = itertools.zip_longest(undisturbed, disturbed, fillvalue={})
    found["records"] = len(disturbed)
    found["records_differ"] = sum(any(one.get(name) != other.get(name) for name in SAME) for one, other in pairs)
    print(json.dumps(found) if options.json else "\n".join(f"{name:<28} {value}" for name, value in found.items()))
    return 0 if found["records_differ"] == 0 and found["exit_codes"] == [0, 0] else 1


def lose_and_return(data: Path, run: Path, play: Play) -> dict[str, Any]:
    """Play it; returns what was found.

    Args:
        data: folder written by ftk-preprocess.
        run: its --save-dir; logs of the agents are written next to it.
        play: what is played.
    """
    with machines(data, run, play) as start:
        first, second = two_agents(start)
        saved = run / "checkpoint_last"
        wait_until(lambda: len(records(run)) >= play.killed_after and saved.exists(), run, first, second)
        killed = time.monotonic()
        kill_machine(second)
        wait_until(lambda: "ftk-train:" in log(run, "first"), run, first)
        noticed = time.monotonic() - killed
        second = start("second-again")
        wait_until(lambda: "continuing after" in log(run, "first") + log(run, "second-again"), run, first, second)
        back = time.monotonic() - killed
        codes = wait_for_end([first, second])
    said = (log(run, "first") + log(run, "second-again")).splitlines()
    return {
        "updates": play.updates,
        "second_agent_killed_at": play.killed_after,
        "went_on_from": next(line.rpartition("| ")[2] for line in said if "continuing after" in line),
        "loss_noticed_after_seconds": round(noticed, 1),
        "went_on_after_seconds": round(back, 1),
        "exit_codes": codes,
    }


class Start:
    """Starts agents of one run. The command is the same on all machines, and the same when one comes back."""

    def __init__(self, data: Path, run: Path, play: Play) -> None:
        self.run, self.started = run, list[subprocess.Popen[bytes]]()
        self.endpoint = f"127.0.0.1:{free_port()}"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self.endpoint, "--rdzv-id", "ftk"]
        torchrun += ["--rdzv-conf", f"keep_alive_interval={play.lost_after_seconds // 3},keep_alive_max_attempt=3"]
        torchrun += ["--max-restarts", "3", "--local-addr", "127.0.0.1"]
        train = ["-m", "ftk_cli.train", str(data), "--arch", "glm_tiny", "--seq-length", "64", "--batch-size", "4"]
        train += ["--device", "cpu", "--max-update", str(play.updates), "--save-dir", str(run), "--log-interval", "1"]
        train += ["--save-interval-updates", str(play.saved_every), "--validate-interval-updates", "0"]
        self.command = [*torchrun, *train, *play.flags]

    def __call__(self, name: str) -> subprocess.Popen[bytes]:
        """A machine's torchrun, with one process; its output goes into a file of that name next to the run."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        # Else an agent that has stayed tells its address in the first round alone, and one that is new in a later round
        # waits for it in vain (torch 2.13, DynamicRendezvousHandler.next_rendezvous).
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        with open(f"{self.run}-{name}.log", "wb") as stream:
            agent = subprocess.Popen(
                self.command, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )
        self.started.append(agent)
        return agent


@contextlib.contextmanager
def machines(data: Path, run: Path, play: Play) -> Iterator[Start]:
    """What starts them; none is left afterwards."""
    start = Start(data, run, play)
    try:
        yield start
    finally:
        for agent in start.started:
            kill_machine(agent)


def two_agents(start: Start) -> list[subprocess.Popen[bytes]]:
    """The first keeps the rendezvous, so that it has to be there before the second one."""
    first = start("first")
    wait_until(lambda: is_listening(start.endpoint), start.run, first)
    return [first, start("second")]


def kill_machine(process: subprocess.Popen[bytes]) -> None:
    """All at once: the agent and what it has started, as when the power goes."""
    for pid in [process.pid, *descendants(process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += [int(child), *descendants(int(child))]
    return found


def wait_until(happens: Callable[[], bool], run: Path, *alive: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happens():
        if any(process.poll() is not None for process in alive) or time.monotonic() > deadline:
            logs = "\n".join(path.read_text(errors="replace") for path in run.parent.glob(f"{run.name}-*.log"))
            raise SystemExit(f"{logs}\nan agent has ended too early, or it takes too long; its log above says why")
        time.sleep(0.05)


def wait_for_end(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=DEADLINE_SECONDS) for process in agents]


def records(run: Path) -> list[dict[str, Any]]:
    """The training records of a run, as far as it has come; what is being written is left out."""
    path = run / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [record for record in map(json.loads, whole.splitlines()) if record["event"] == "train"]


def log(run: Path, name: str) -> str:
    path = Path(f"{run}-{name}.log")
    return path.read_text(errors="replace") if path.exists() else ""


def is_listening(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


if __name__ == "__main__":
    sys.exit(main())
