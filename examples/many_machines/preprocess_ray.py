"""Preprocessing on a Ray cluster: a task for each shard, done again where its worker was lost; then one merge.

    python preprocess_ray.py --shards 64 --destdir /shared/data-bin --trainpref '/shared/corpus/*.jsonl' \\
        --tokenizer sentencepiece --tokenizer-path /shared/tokenizer

Flags that it does not know are those of ftk-preprocess, with paths that every machine has. `pip install ray`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence

import ray


@ray.remote(max_retries=3)  # of workers and machines that were lost; a shard that is run twice writes the same
def encode(shard: str, folder: str, flags: list[str]) -> str:
    """Runs ftk-preprocess for one shard, in a process of its own, which may start others."""
    command = [sys.executable, "-m", "ftk_cli", "preprocess", *flags, "--shard", shard, "--destdir", folder]
    done = subprocess.run([*command, "--overwrite"], stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:  # a mistake, which another try would repeat: Ray passes it on
        raise RuntimeError(f"shard {shard}: {done.stderr.strip()}")
    return shard


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--shards", type=int, required=True, help="number of tasks; more than machines")
    parser.add_argument("--destdir", required=True, help="data folder to make; the shards lie in DESTDIR.shards")
    parser.add_argument("--cpus", type=int, default=1, help="cores of a task, and its processes that encode")
    parser.add_argument("--address", help="of a cluster, e.g. auto; default: Ray on this machine")
    given, flags = parser.parse_known_args(argv)

    ray.init(address=given.address, ignore_reinit_error=True)
    folders = [f"{given.destdir}.shards/{number}" for number in range(1, given.shards + 1)]
    flags += ["--workers", str(given.cpus)]
    task = encode.options(num_cpus=given.cpus)
    waiting = [task.remote(f"{number}/{given.shards}", folder, flags) for number, folder in enumerate(folders, start=1)]
    while waiting:
        ready, waiting = ray.wait(waiting)
        print(f"shard {ray.get(ready[0])} is there, {len(waiting)} to come", flush=True)
    merge = [sys.executable, "-m", "ftk_cli", "data", "merge", "--destdir", given.destdir, "--overwrite"]
    return subprocess.run([*merge, "--shards", *folders]).returncode


if __name__ == "__main__":
    raise SystemExit(main())
