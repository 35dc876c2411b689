"""Memory of ftk-preprocess, all its processes together, on a generated file of any size.

    python scripts/benchmark/preprocess_memory.py --gigabytes 2 --dedup --json out.json
    python scripts/benchmark/preprocess_memory.py --quick

The file holds sentences of real words, no two alike, and every 500 MB a line of 2 MB. While ftk-preprocess
encodes it, the proportional set sizes (PSS: private pages, and shared pages divided by those who share them) of its
whole process tree are added up ten times per second; `peak` is the greatest sum. Linux only.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import TEST_DATA

LONG_LINE_BYTES = 2_000_000
LONG_LINE_EVERY = 500_000_000
TENTHS = 10


def main() -> None:
    options = parse_options()
    num_bytes = int(1e9 * (0.03 if options.quick else options.gigabytes))
    with tempfile.TemporaryDirectory(prefix="ftk-benchmark-", dir=options.folder) as folder:
        text = Path(folder) / "text.txt"
        lines = generate(text, num_bytes)
        command = [sys.executable, "-c", "import sys; from ftk_cli.preprocess import main; sys.exit(main())"]
        command += ["--trainpref", str(text), "--destdir", f"{folder}/out", "--workers", str(options.workers)]
        command += ["--tokenizer", options.tokenizer, "--tokenizer-path", str(options.tokenizer_path)]
        command += ["--dedup"] if options.dedup else []
        started = time.monotonic()
        with open(Path(folder) / "log", "w+") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            peaks = watch(process)
            if process.returncode:
                log.seek(0)
                sys.exit(log.read())
        row = {
            "megabytes": text.stat().st_size / 1e6,
            "lines": lines,
            "tokenizer": options.tokenizer,
            "workers": options.workers,
            "dedup": options.dedup,
            "seconds": time.monotonic() - started,
            "peak_megabytes": max(peaks),
            "peak_megabytes_by_tenth": peaks,
        }
    print(
        f"{row['megabytes']:,.0f} MB, {lines:,} lines, {options.tokenizer}, {options.workers} workers, "
        f"dedup {options.dedup}: {row['seconds']:.0f} s, peak PSS of all processes {max(peaks):.0f} MB"
    )
    print("by tenth of the time, MB:", " ".join(f"{peak:.0f}" for peak in peaks))
    if options.json:
        options.json.write_text(json.dumps(row, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the file (default 2)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--dedup", action="store_true", help="with --dedup, which remembers each document")
    parser.add_argument("--tokenizer", default="sentencepiece")
    parser.add_argument("--tokenizer-path", type=Path, default=TEST_DATA / "tokenizers" / "cog-pretrain.model")
    parser.add_argument("--quick", action="store_true", help="30 MB")
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args()


def generate(path: Path, num_bytes: int) -> int:
    """Writes about `num_bytes`; the number of lines."""
    chosen = random.Random(1)
    words = sorted(set((TEST_DATA / "english" / "valid.txt").read_text(encoding="utf-8").split()))
    phrases = [" ".join(chosen.choices(words, k=12)) for _ in range(20_000)]
    lines = written = 0
    next_long = LONG_LINE_EVERY
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        while written < num_bytes:
            batch = [f"{lines + i} {' '.join(chosen.choices(phrases, k=chosen.randint(1, 5)))}\n" for i in range(1000)]
            if written + LONG_LINE_BYTES >= min(next_long, num_bytes):
                batch.append("a long line " * (LONG_LINE_BYTES // 12) + "\n")
                next_long += LONG_LINE_EVERY
            written += sum(map(file.write, batch))
            lines += len(batch)
    return lines


def watch(process: subprocess.Popen[bytes]) -> list[float]:
    """The greatest PSS of a process tree, MB, in each tenth of its life."""
    samples = []
    while process.poll() is None:
        samples.append(sum(map(proportional_set_size, tree(process.pid))) / 1e6)
        time.sleep(0.1)
    step = max(1, -(-len(samples) // TENTHS))
    return [max(samples[i : i + step]) for i in range(0, len(samples), step)]


def tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except OSError:  # it has ended
            continue
    return found


def proportional_set_size(pid: int) -> int:
    """Bytes; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    main()
