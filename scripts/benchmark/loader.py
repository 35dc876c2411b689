"""The share of training time that the model waits for data: glm_tiny on real text, by the trainer's own timers.

    python scripts/benchmark/loader.py
    python scripts/benchmark/loader.py --quick --json out.json

Runs `ftk-train` with one worker and, as the naive way, with none (the training process makes its own batches), in turn,
several rounds, and prints the `data_share` of their records: the time between asking for the batches of an update and
having them, divided by all training time. The first record is left out, it has the start of the worker in it. Speeds
are of the best round of each way. A small vocabulary makes the model fast and the loader's task hard.

The goal is a share under 2 % with one worker on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from pathlib import Path

from common import TEST_DATA, run_command

GOAL = 0.02
VOCABULARY = TEST_DATA / "tokenizers" / "cog-pretrain.model"
CORPORA: tuple[tuple[str, str, tuple[str | Path, ...]], ...] = (
    ("English", "english/train.txt", ("--vocab-size", "4000")),
    ("Chinese", "chinese/train.jsonl", ("--tokenizer", "sentencepiece", "--tokenizer-path", VOCABULARY)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one corpus, one round, few updates")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="CPU threads of the model")
    parser.add_argument("--seq-length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=16)
    options = parser.parse_args()
    corpora, rounds, updates = (CORPORA[:1], 1, 12) if options.quick else (CORPORA, 3, 40)
    options.threads = options.threads[:1] if options.quick else options.threads
    rows = []
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    print(
        f"{'corpus':<9} {'threads':>7} {'workers':>7} {'waiting, best':>13} {'worst':>7} {'tokens/s':>9} {'ratio':>6}"
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text, tokenizer in corpora:
            data = Path(folder) / name
            run_command(
                "preprocess", "--trainpref", TEST_DATA / text, "--destdir", data, *tokenizer, OMP_NUM_THREADS="2"
            )
            for threads in options.threads:
                found: dict[int, list[dict[str, float]]] = {0: [], 1: []}
                for number in range(rounds):
                    for workers, measured in found.items():
                        save_dir = Path(folder) / f"run-{name}-{threads}-{workers}-{number}"
                        measured.append(train(data, save_dir, workers, threads, updates, options))
                naive = max(run["tokens_per_second"] for run in found[0])
                for workers, measured in found.items():
                    shares = [run["data_share"] for run in measured]
                    speed = max(run["tokens_per_second"] for run in measured)
                    row = {"corpus": name, "threads": threads, "workers": workers, "data_share": min(shares)}
                    row |= {"worst_data_share": max(shares), "tokens_per_second": speed, "ratio": speed / naive}
                    rows.append(row)
                    print(
                        f"{name:<9} {threads:>7} {workers:>7} {min(shares):>13.2%} {max(shares):>7.2%} {speed:>9.0f} "
                        f"{speed / naive:>6.2f}"
                    )
    worst = max(row["worst_data_share"] for row in rows if row["workers"] == 1)
    print(f"\nwith one worker at most {worst:.2%}, goal {GOAL:.0%}: {'reached' if worst < GOAL else 'missed'}")
    if options.json:
        options.json.write_text(json.dumps({"goal": GOAL, "rows": rows}, indent=1) + "\n", encoding="utf-8")


def train(
    data: Path, save_dir: Path, workers: int, threads: int, updates: int, options: argparse.Namespace
) -> dict[str, float]:
    """Means over the records of one run but the first."""
    interval = max(1, updates // 4)
    run_command(
        *("train", data, "--arch", "glm_tiny", "--seq-length", options.seq_length, "--batch-size", options.batch_size),
        *("--max-update", updates, "--log-interval", interval, "--valid-subset", "none", "--no-save"),
        *("--num-workers", workers, "--num-threads", threads, "--device", "cpu", "--save-dir", save_dir),
        *("--log-format", "json"),
        OMP_NUM_THREADS=str(threads),
    )
    lines = (save_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if record["event"] == "train"][1:]
    return {name: sum(r[name] for r in records) / len(records) for name in ("data_share", "tokens_per_second")}


if __name__ == "__main__":
    main()
