"""Peak memory of training all weights, an adapter beside them, and one beside weights in int8.

    python scripts/benchmark/adapter_memory.py DATA --arch gpt2

Each way is an `ftk-train` of a few updates in a process of its own, from the same weights, with the same batches. The
figure is `peak_memory_bytes` of its records, on a CPU the most resident memory, less that of a process which has
trained a model of 64 hidden units.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
from pathlib import Path

from common import run_command

TINY = "--arch gpt2_tiny"
WAYS = {
    "all weights": "--finetune-from {folder}/base",
    "LoRA": "--finetune-from {folder}/base --adapter lora",
    "LoRA beside int8": "--finetune-from {folder}/int8 --adapter lora",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="folder written by ftk-preprocess")
    parser.add_argument("--arch", default="gpt2", help="architecture, with random weights")
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--checkpointing", default="full", help="as --activation-checkpointing of ftk-train")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run("train", options, f"--arch {options.arch} --max-update 1 --save-dir {folder}/base")
        run_command("checkpoint", *f"export {folder}/base {folder}/int8 --quantize int8".split())
        least = peak(options, TINY, folder / "tiny")
        print(f"{options.arch}, batch {options.batch_size} x {options.seq_length}, updates: {options.updates}")
        print(f"{'trained':<20}{'peak MB':>10}{'of all weights':>16}")
        first = None
        for way, flags in WAYS.items():
            found = peak(options, flags.format(folder=folder), folder / way.replace(" ", "_")) - least
            first = first or found
            print(f"{way:<20}{found / 1e6:>10.0f}{found / first:>16.0%}", flush=True)
    return 0


def peak(options: argparse.Namespace, flags: str, save_dir: Path) -> int:
    """The most memory of a training, in bytes."""
    run("train", options, f"{flags} --max-update {options.updates} --no-save --log-interval 1 --save-dir {save_dir}")
    lines = map(json.loads, (save_dir / "metrics.jsonl").read_text().splitlines())
    return max(line["peak_memory_bytes"] for line in lines if "peak_memory_bytes" in line)


def run(name: str, options: argparse.Namespace, flags: str) -> None:
    shape = f"--batch-size {options.batch_size} --seq-length {options.seq_length} --valid-subset none --device cpu"
    flags = f"{options.data} {shape} --activation-checkpointing {options.checkpointing} {flags}"
    run_command(name, *shlex.split(flags))


if __name__ == "__main__":
    raise SystemExit(main())
