"""Whether preprocessing in shards stays linear, with constant memory: CPU time and peak memory of 1, 4 and 16 shards.

python scripts/benchmark/preprocess_shards.py --megabytes 64

Text is made of random words. Shards run one after the other, each with one process that encodes; memory is that of its
largest process. All is merged, and compared with the one run.
"""

from __future__ import annotations

import argparse
import filecmp
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

SHARDS = (1, 4, 16)


def make_text(path: Path, megabytes: int) -> None:
    """Lines of 20 words out of 20,000, the frequent ones often (Zipf)."""
    random = np.random.default_rng(1)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    words = ["".join(random.choice(letters, size=length)) for length in random.integers(2, 11, size=20_000)]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1_000_000:
            chosen = np.minimum(random.zipf(1.2, size=(10_000, 20)) - 1, len(words) - 1)
            file.writelines(" ".join(words[number] for number in row) + "\n" for row in chosen.tolist())


def measured(*words: object) -> tuple[float, float, float]:
    """Seconds, CPU seconds and MB of the largest process of a command, its children included."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "ftk_cli", *map(str, words)], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        raise SystemExit(f"{words[0]} failed")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64, help="of text")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_text(folder / "small.txt", 1)
        make_text(folder / "text.txt", given.megabytes)
        measured("preprocess", "--trainpref", folder / "small.txt", "--vocab-size", 8000, "--destdir", folder / "small")
        flags = ["--trainpref", folder / "text.txt", "--tokenizer-path", folder / "small" / "tokenizer", "--workers", 1]
        print("shards  seconds  CPU s  CPU s of the longest  MB  merge s  merge MB  equal")
        for count in SHARDS:
            folders = [folder / f"{count}-{number}" for number in range(1, count + 1)]
            parts = [
                measured("preprocess", *flags, "--shard", f"{number}/{count}", "--destdir", out)
                for number, out in enumerate(folders, start=1)
            ]
            merged = folder / f"merged-{count}"
            seconds, _, memory = measured("data", "merge", "--shards", *folders, "--destdir", merged)
            wall, cpu = sum(part[0] for part in parts), sum(part[1] for part in parts)
            longest, most = max(part[1] for part in parts), max(part[2] for part in parts)
            same = filecmp.cmp(merged / "train.bin", folder / "merged-1" / "train.bin", shallow=False)
            row = f"{count:>6}  {wall:>7.1f}  {cpu:>5.1f}  {longest:>20.1f}  {most:>3.0f}  {seconds:>6.1f}"
            print(f"{row}  {memory:>8.0f}  {'yes' if same else 'no'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
