"""Two machines of a run, played by two torchrun agents on this one: one is lost and comes back, and the run goes on.

    python scripts/elastic_test.py data-bin [--json]

Both agents meet by torchrun's own rendezvous (c10d) on the loopback. Once the run has a checkpoint, the second agent
and its process are killed as a machine is that loses power. The first one's process ends, its agent waits, the second
one is started again by the very same command, and both go on from the last checkpoint. The records that the run leaves
are compared with those of a run that nobody disturbed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
UPDATES = 40
SAVED_EVERY = 10
KILLED_AFTER = 23
DEADLINE_SECONDS = 300.0
SAME = ("num_updates", "loss", "gnorm", "lr", "epoch")  # of a record; the others are of the machine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder written by ftk-preprocess")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = lose_and_return(Path(options.data), Path(folder))
    print(json.dumps(found) if options.json else "\n".join(f"{name:<28} {value}" for name, value in found.items()))
    return 0 if found["records_differ"] == 0 and found["exit_codes"] == [0, 0] else 1


def lose_and_return(data: Path, folder: Path) -> dict[str, object]:
    """Play it; returns what was found."""
    endpoint = f"127.0.0.1:{free_port()}"
    wait_for_end(two_agents(data, folder / "whole", endpoint, folder))
    endpoint = f"127.0.0.1:{free_port()}"
    first, second = two_agents(data, folder / "run", endpoint, folder)
    try:
        wait_until(lambda: len(records(folder / "run")) >= KILLED_AFTER, first, second)
        killed = time.monotonic()
        kill_machine(second)
        wait_until(lambda: "ftk-train:" in log(folder, "first"), first)
        noticed = time.monotonic() - killed
        second = agent(data, folder / "run", endpoint, folder, "second-again")
        wait_until(lambda: "continuing after" in log(folder, "first") + log(folder, "second-again"), first, second)
        back = time.monotonic() - killed
        codes = wait_for_end([first, second])
    finally:
        for process in (first, second):
            kill_machine(process)
    undisturbed, disturbed = records(folder / "whole"), records(folder / "run")
    pairs = zip(undisturbed, disturbed, strict=False)
    differ = sum(any(one[name] != other[name] for name in SAME) for one, other in pairs)
    said = (log(folder, "first") + log(folder, "second-again")).splitlines()
    return {
        "updates": UPDATES,
        "second_agent_killed_at": KILLED_AFTER,
        "went_on_from": next(line.rpartition("| ")[2] for line in said if "continuing after" in line),
        "loss_noticed_after_seconds": round(noticed, 1),
        "went_on_after_seconds": round(back, 1),
        "records": len(disturbed),
        "records_differ": differ + abs(len(undisturbed) - len(disturbed)),
        "exit_codes": codes,
    }


def two_agents(data: Path, save_dir: Path, endpoint: str, folder: Path) -> list[subprocess.Popen[bytes]]:
    """The first keeps the rendezvous, so that it has to be there before the second one."""
    first = agent(data, save_dir, endpoint, folder, "first")
    wait_until(lambda: is_listening(endpoint), first)
    return [first, agent(data, save_dir, endpoint, folder, "second")]


def agent(data: Path, save_dir: Path, endpoint: str, folder: Path, name: str) -> subprocess.Popen[bytes]:
    """A machine's torchrun, with one process. The command is the same on both, and the same when one comes back."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "ftk", "--max-restarts", "3"]
    torchrun += ["--local-addr", "127.0.0.1"]
    train = ["-m", "ftk_cli.train", str(data), "--arch", "glm_tiny", "--seq-length", "64", "--batch-size", "4"]
    train += ["--device", "cpu", "--max-update", str(UPDATES), "--save-interval-updates", str(SAVED_EVERY)]
    train += ["--log-interval", "1", "--validate-interval-updates", "0", "--save-dir", str(save_dir)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    # Else an agent that has stayed tells its address in the first round alone, and one that is new in a later round
    # waits for it in vain (torch 2.13, DynamicRendezvousHandler.next_rendezvous).
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    with open(folder / f"{save_dir.name}-{name}.log", "wb") as stream:
        return subprocess.Popen(
            [*torchrun, *train], env=environment, stdout=stream, stderr=stream, start_new_session=True
        )


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


def wait_until(happens, *alive: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not happens():
        if any(process.poll() is not None for process in alive) or time.monotonic() > deadline:
            raise SystemExit("an agent has ended too early, or it takes too long; its log says why")
        time.sleep(0.05)


def wait_for_end(agents: list[subprocess.Popen[bytes]]) -> list[int]:
    return [process.wait(timeout=DEADLINE_SECONDS) for process in agents]


def records(run: Path) -> list[dict[str, object]]:
    """The training records of a run, as far as it has come."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["event"] == "train"]


def log(folder: Path, name: str) -> str:
    path = folder / f"run-{name}.log"
    return path.read_text(errors="replace") if path.exists() else ""


def is_listening(endpoint: str) -> bool:
    host, _, port = endpoint.partition(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
