"""Trains the same few updates in every arrangement of up to four processes, through the command line, and compares the
records with those of one process; then continues runs that stopped in one arrangement in another.

    python scripts/parallel_matrix.py DATA [--updates 10] [--only T2 P2 ...] [--json FILE]

DATA is a folder written by ftk-preprocess. Names of arrangements: T tensor, P pipeline, S shard, R replicate, and the
number of processes of each. Exit code 0 if every difference is below its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MICRO_BATCHES = 8  # of an update, over all processes
FLAGS = {
    "T": "--tensor-parallel-size",
    "P": "--pipeline-parallel-size",
    "S": "--data-parallel-shard-size",
    "R": "--data-parallel-replicate-size",
}
COMPARED = ("loss", "loss_token", "loss_sentence", "loss_document", "gnorm", "num_targets")
LIMIT = 1e-5  # relative
RUN_SECONDS = 300.0


@dataclass(frozen=True)
class Case:
    """One row of the matrix.

    Attributes:
        name: such as "T2xS2".
        options: in addition to those of the arrangement, for this run and the one process that it is compared with.
        parallel: options for this run alone.
        limit: relative, for every figure of every update.
    """

    name: str
    options: tuple[str, ...] = ()
    parallel: tuple[str, ...] = ()
    limit: float = LIMIT
    note: str = ""

    @property
    def sizes(self) -> dict[str, int]:
        return {letter: int(size) for letter, size in re.findall(r"([TPSR])(\d+)", self.name)}

    @property
    def processes(self) -> int:
        product = 1
        for size in self.sizes.values():
            product *= size
        return product

    @property
    def data(self) -> int:
        return self.sizes.get("S", 1) * self.sizes.get("R", 1)


ARRANGEMENTS = ["T2", "P2", "S2", "R2", "T4", "P4", "S4", "R4", "T2xP2", "T2xS2", "T2xR2", "P2xS2", "P2xR2", "S2xR2"]
BF16 = 2e-2  # rounding differs where sums are cut

CASES = [
    *(Case(name) for name in ARRANGEMENTS),
    Case("T2", parallel=("--sequence-parallel",), note="sequence parallel"),
    Case("T4", parallel=("--sequence-parallel",), note="sequence parallel"),
    Case("T2xP2", parallel=("--sequence-parallel",), note="sequence parallel"),
    Case("T2xS2", parallel=("--sequence-parallel",), note="sequence parallel"),
    Case("S2", parallel=("--zero-stage", "2"), note="ZeRO-2"),
    Case("S2", parallel=("--zero-stage", "1"), note="ZeRO-1"),
    Case("S2", parallel=("--cpu-offload",), note="offload"),
    Case("P2", parallel=("--pipeline-schedule", "gpipe"), note="GPipe"),
    Case("P2", parallel=("--pipeline-schedule", "interleaved"), note="interleaved"),
    Case("P2", parallel=("--pipeline-schedule", "zero-bubble"), note="zero bubble"),
    Case("P2", parallel=("--pipeline-layers", "3,1"), note="3 + 1 layers"),
    *(Case(name, ("--label-smoothing", "0.1"), note="smoothing") for name in ("T2", "P2")),
    *(
        Case(name, ("--activation-checkpointing", mode), note=f"{mode} checkpointing")
        for name, mode in (("T2xS2", "full"), ("T2xP2", "selective"), ("S2", "full"))
    ),
    *(Case(name, ("--compile", "block"), note="compile") for name in ("T2", "S2")),
    *(Case(name, ("--ema-decay", "0.9"), note="EMA") for name in ("S2", "T2xP2")),
    *(Case(name, ("--precision", "bf16"), limit=BF16, note="bf16") for name in ("T2", "S2", "P2", "R2", "T2xS2")),
]
CHAIN = ["T2", "one", "S4", "T2xP2", "R2", "P4", "T2xS2", "S2xR2", "P2", "one"]
"""A run stops after some updates in each, and continues in the next."""


@dataclass
class Runs:
    """Runs ftk-train, each single-process run once."""

    data: Path
    folder: Path
    updates: int
    references: dict[tuple[str, ...], list[dict[str, Any]]] = field(default_factory=dict)

    def reference(self, options: tuple[str, ...]) -> list[dict[str, Any]]:
        """The records of one process."""
        if options not in self.references:
            self.references[options] = self.train(Case("", options), self.updates, f"one{len(self.references)}")
        return self.references[options]

    def train(self, case: Case, updates: int, save_dir: str) -> list[dict[str, Any]]:
        """The records of a run, also of what it did before if it continues.

        Raises:
            RuntimeError: it failed; with the end of its output.
        """
        command = [sys.executable, "-m", "ftk_cli.train"]
        if case.processes > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(case.processes), "--standalone"]
            command = [sys.executable, *launcher, "-m", "ftk_cli.train"]
        own = {
            "--batch-size": 2,
            "--update-freq": MICRO_BATCHES // case.data,
            "--max-update": updates,
            "--save-dir": self.folder / save_dir,
            **{FLAGS[letter]: size for letter, size in case.sizes.items()},
        }
        flags = [str(part) for pair in own.items() for part in pair]
        command += [str(self.data), *COMMON, *flags, *case.options, *case.parallel]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-3000:]}")
        lines = (self.folder / save_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


COMMON = (
    *("--arch", "glm_tiny", "--seq-length", "64", "--dropout", "0", "--attention-dropout", "0"),
    *("--embedding-dropout", "0", "--lr", "1e-3", "--eps", "1e-6", "--lr-scheduler", "constant"),
    *("--warmup-updates", "2", "--clip-norm", "0.5", "--log-interval", "1", "--log-format", "json"),
    *("--validate-interval-updates", "5", "--max-valid-samples", "17", "--no-async-save"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--only", nargs="*", help="arrangements; none of the chain")
    parser.add_argument("--json", type=Path, help="write the table here too")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ftk-matrix-"))
    try:
        runs = Runs(options.data.resolve(), folder, options.updates)
        rows = [row(runs, case, number) for number, case in enumerate(CASES) if wanted(case.name, options.only)]
        if options.only is None:
            rows += chain(runs)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        return 0 if all(each["ok"] for each in rows) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wanted(name: str, only: list[str] | None) -> bool:
    return only is None or name in only


def row(runs: Runs, case: Case, number: int) -> dict[str, Any]:
    """One arrangement against one process; printed as soon as it is known."""
    began = time.perf_counter()
    try:
        records = runs.train(case, runs.updates, f"run{number}")
        found = differences(records, runs.reference(case.options))
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return report(case, {"failed": str(error)}, began)
    return report(case, found, began)


def chain(runs: Runs) -> list[dict[str, Any]]:
    """One run through all of `CHAIN`, one update or two in each, against one process that is not disturbed."""
    rows = []
    whole = runs.train(Case(""), 2 * len(CHAIN), "chain-one")
    for place, name in enumerate(CHAIN):
        case = Case("" if name == "one" else name, note=f"continues after {2 * place} updates")
        began = time.perf_counter()
        try:
            records = runs.train(case, 2 * (place + 1), "chain")
            # A stop validates, where the whole run did not.
            trained = [[r for r in side if r["event"] == "train"] for side in (records, whole[: len(whole)])]
            found = differences(trained[0], trained[1][: len(trained[0])])
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            rows.append(report(case, {"failed": str(error)}, began))
            break
        rows.append(report(case, found, began))
    return rows


def differences(records: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> dict[str, float]:
    """The largest relative difference of each figure over all records."""
    if [record["event"] for record in records] != [record["event"] for record in wanted]:
        raise RuntimeError(f"{len(records)} records, one process has {len(wanted)}, or others")
    found: dict[str, float] = {}
    for record, right in zip(records, wanted, strict=True):
        for name, value in right.items():
            if name in COMPARED or (name.startswith("ema_") and "loss" in name):
                kind = f"valid {name}" if record["event"] == "valid" else name
                relative = abs(record[name] - value) / max(abs(value), 1e-12)
                found[kind] = max(found.get(kind, 0.0), relative)
    return found


def report(case: Case, found: dict[str, Any], began: float) -> dict[str, Any]:
    """A row of the table, printed."""
    worst = max((value for value in found.values() if isinstance(value, float)), default=float("inf"))
    ok = "failed" not in found and worst <= case.limit
    name = " ".join(part for part in (case.name or "one process", case.note) if part)
    losses = [value for key, value in found.items() if key == "loss"]
    text = found.get("failed") or (
        f"loss {max(losses):.1e}  gnorm {found.get('gnorm', 0.0):.1e}  valid {found.get('valid loss', 0.0):.1e}  "
        f"worst of all {worst:.1e}"
    )
    print(f"{'ok  ' if ok else 'BAD '} {name:<32} {text}  ({time.perf_counter() - began:.0f} s)", flush=True)
    return {"name": name, "ok": ok, "limit": case.limit, **found}


if __name__ == "__main__":
    sys.exit(main())
