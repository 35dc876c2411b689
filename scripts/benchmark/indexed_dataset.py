"""Reading `.bin/.idx`: look-ups against plain NumPy memory maps, opening and checking a huge index.

    python scripts/benchmark/indexed_dataset.py                       # real text, synthetic, 100 million documents
    python scripts/benchmark/indexed_dataset.py --quick --json out.json

The naive way, in this file, is `NumpyReader`, which maps the .bin file, copies lengths and pointers into aligned arrays
once, and answers with `numpy.frombuffer` over the map (what fairseq and Megatron do; slicing a `numpy.memmap` is slower
and is shown as well).

Both ways run in turn, several rounds; the figures are of each way's best round. Orders are random. Pages are
warm: the disk is not what is measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ftk.data.indexed._index import flatten
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter, optimal_dtype
from ftk.data.text.preprocess_config import TextConfig
from ftk.data.text.records import read_documents
from ftk.tokenizers import build_tokenizer

ENGLISH = Path("/work/shared/data/english/train.txt")
CHINESE = Path("/work/shared/data/chinese/train.jsonl")
GPT2 = ("gpt2_bpe", "/work/shared/data/tokenizers/gpt2-vocab.json")
SENTENCEPIECE = ("sentencepiece", "/work/shared/data/tokenizers/cog-pretrain.model")


class NumpyReader:
    """The straightforward reader: lengths and pointers as arrays, tokens from a memory map."""

    def __init__(self, prefix: Path) -> None:
        dataset = IndexedDataset(prefix)
        layout = dataset.layout
        index = np.memmap(f"{prefix}.idx", mode="r", order="C")
        count = layout.num_sequences
        self.sizes = np.frombuffer(index, dtype=np.int32, count=count, offset=layout.sizes_at).copy()
        self.pointers = np.frombuffer(index, dtype=np.int64, count=count, offset=layout.pointers_at).copy()
        self.dtype = dataset.dtype
        self.map = np.memmap(f"{prefix}.bin", mode="r", order="C")
        self.buffer = memoryview(self.map)
        self.tokens = np.memmap(f"{prefix}.bin", dtype=self.dtype, mode="r")

    def __getitem__(self, index: int) -> np.ndarray:
        return np.frombuffer(self.buffer, dtype=self.dtype, count=self.sizes[index], offset=self.pointers[index])

    def by_slice(self, index: int) -> np.ndarray:
        start = self.pointers[index] // self.dtype.itemsize
        return self.tokens[start : start + self.sizes[index]]


def in_turn(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Seconds of the best round of each way; they take turns."""
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            best[name] = min(best[name], time.perf_counter() - started)
    return best


def look_ups(name: str, prefix: Path, lookups: int, rounds: int) -> list[dict[str, Any]]:
    ours, naive = IndexedDataset(prefix), NumpyReader(prefix)
    order = np.random.default_rng(1).integers(0, len(ours), size=lookups)
    listed = order.tolist()  # plain ints, the quickest for both

    def each(get: Callable[[int], Any]) -> Callable[[], None]:
        def way() -> None:
            for index in listed:
                get(index)

        return way

    def ours_loop() -> None:
        for index in listed:
            ours[index]

    def naive_loop() -> None:
        for index in listed:
            naive[index]

    seconds = in_turn({"ours": ours_loop, "frombuffer": naive_loop, "memmap": each(naive.by_slice)}, rounds)
    return [
        {
            "what": f"look-up, {name}",
            "unit": "look-ups/s",
            "ours": lookups / seconds["ours"],
            "naive": lookups / seconds["frombuffer"],
            "memmap_slice": lookups / seconds["memmap"],
            "ratio": seconds["frombuffer"] / seconds["ours"],
            "goal": 2.0,
        }
    ]


OPEN_AND_CHECK = """
import sys, time
from ftk.data.indexed.dataset import IndexedDataset
def resident():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) / 1024
before = resident()
started = time.perf_counter()
dataset = IndexedDataset(sys.argv[1])
opened = time.perf_counter() - started
started = time.perf_counter()
dataset[len(dataset) // 2]
checked = time.perf_counter() - started
started = time.perf_counter()
dataset[len(dataset) // 3]
second = time.perf_counter() - started
print(opened, checked, second, resident() - before, len(dataset))
"""


def huge_index(folder: Path, documents: int, length: int = 500) -> Path:
    """An index of `documents` documents of `length` uint16 tokens, over a sparse .bin file: all tokens are 0."""
    prefix = folder / "huge"
    with IndexedDatasetWriter(prefix, np.uint16):
        pass
    with open(f"{prefix}.idx", "r+b") as file:
        header = bytearray(file.read(34))
        header[18:26] = documents.to_bytes(8, "little")
        header[26:34] = (documents + 1).to_bytes(8, "little")
        file.seek(0)
        file.write(header)
        step = 1 << 20
        for first in range(0, documents, step):
            np.full(min(step, documents - first), length, dtype="<i4").tofile(file)
        for first in range(0, documents, step):
            (np.arange(first, min(first + step, documents), dtype="<i8") * (2 * length)).tofile(file)
        for first in range(0, documents + 1, step):
            np.arange(first, min(first + step, documents + 1), dtype="<i8").tofile(file)
    os.truncate(f"{prefix}.bin", documents * 2 * length)
    return prefix


def opening(folder: Path, documents: int, rounds: int) -> list[dict[str, Any]]:
    prefix = huge_index(folder, documents)
    results = []
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", OPEN_AND_CHECK, str(prefix)], capture_output=True, text=True, check=True
        )
        results.append([float(number) for number in done.stdout.split()])
    opened, checked, second, memory, count = min(results)
    results_of = {
        "what": f"open {int(count):,} documents, ours",
        "milliseconds": 1e3 * opened,
        "goal_milliseconds": 50.0,
        "first_access_with_whole_check_s": checked,
        "second_access_us": 1e6 * second,
        "peak_memory_growth_mb": memory,
        "index_bytes": os.path.getsize(f"{prefix}.idx"),
        "data_bytes": os.path.getsize(f"{prefix}.bin"),
        "data_bytes_on_disk": 512 * os.stat(f"{prefix}.bin").st_blocks,
    }
    return [results_of]


def real_text(folder: Path, limit: int | None) -> dict[str, Path]:
    """English as GPT-2 BPE and Chinese as SentencePiece ids: real lengths, real order."""
    prefixes = {}
    for name, path, tokenizer in (("english", ENGLISH, GPT2), ("chinese", CHINESE, SENTENCEPIECE)):
        if not path.exists():
            print(f"{path}: not there, left out", file=sys.stderr)
            continue
        encoder = build_tokenizer(tokenizer[0], path=tokenizer[1])
        texts = [document.text for document in itertools.islice(read_documents([str(path)], TextConfig()), limit)]
        with IndexedDatasetWriter(folder / name, optimal_dtype(encoder.vocab_size)) as writer:
            for first in range(0, len(texts), 1000):
                writer.add_documents(*flatten(encoder.encode_batch(texts[first : first + 1000]), writer.dtype))
        prefixes[name] = folder / name
    return prefixes


def synthetic(folder: Path, documents: int, mean: int) -> Path:
    generator = np.random.default_rng(mean)
    lengths = generator.integers(1, 2 * mean, size=documents)
    with IndexedDatasetWriter(folder / f"synthetic-{mean}", np.uint16) as writer:
        writer.add_documents(generator.integers(0, 50000, size=lengths.sum(), dtype=np.uint16), lengths)
    return folder / f"synthetic-{mean}"


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'what':<66} {'ours':>12} {'naive':>12} {'ratio':>6} {'goal':>5}")
    for result in results:
        if "ratio" in result:
            print(
                f"{result['what']:<66} {result['ours']:>12,.0f} {result['naive']:>12,.0f} "
                f"{result['ratio']:>5.1f}x {result['goal']:>4.0f}x  {result['unit']}"
            )
            print(f"{'  (a slice of numpy.memmap instead)':<66} {'':>12} {result['memmap_slice']:>12,.0f}")
        else:
            print(
                f"{result['what']}: {result['milliseconds']:.2f} ms (goal {result['goal_milliseconds']:.0f} ms); "
                f"first access with the whole check {result['first_access_with_whole_check_s']:.2f} s, "
                f"{result['peak_memory_growth_mb']:.0f} MB more memory; then {result['second_access_us']:.0f} us"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("--documents", type=int, default=None, help="documents of the huge index")
    parser.add_argument("--folder", default=None, help="where to make the files (default: a temporary folder)")
    arguments = parser.parse_args()
    quick = arguments.quick
    folder = Path(tempfile.mkdtemp(prefix="ftk-benchmark-", dir=arguments.folder))
    try:
        count, rounds = (20_000, 3) if quick else (300_000, 7)
        prefixes = real_text(folder, 2_000 if quick else None)
        for mean in (32, 128, 512):
            prefixes[f"synthetic, mean {mean}"] = synthetic(folder, 20_000 if quick else 200_000, mean)
        results = []
        for name, prefix in prefixes.items():
            results += look_ups(name, prefix, count, rounds)
        results += opening(folder, arguments.documents or (2_000_000 if quick else 100_000_000), 3)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(results)
    machine = {"machine": platform.processor() or platform.machine(), "cpus": os.cpu_count()}
    machine |= {"python": platform.python_version(), "numpy": np.__version__}
    print(f"{machine}, peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({**machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
