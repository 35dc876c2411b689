"""ftk-preprocess from text to folder against the tokenizer's library alone, on the same number of processes.

    python scripts/benchmark/preprocess.py --workers 1 2 --json out.json
    python scripts/benchmark/preprocess.py --quick

The library: as many processes, each with its share of the texts in memory as strings and its tokenizer loaded,
call `SentencePieceProcessor.encode` (one thread) or `Tokenizer.encode_batch_fast(...)` and `.ids` on 128 KiB of
text at a time (with 1 MiB it is slower); the time is from the moment that all are ready to the moment that the
last is done. Nothing is read, parsed, filtered, written or checked.

Ours: the whole command in a process of its own, from its start to its end: starting Python, loading the
tokenizer, reading the file, encoding, writing, checksums, flushing to the disk. Rates are bytes of the text file
a second, for both. The text is the real one, repeated up to --megabytes.

Both run in turn, --rounds times. `ratio` is the median over the rounds of ours / library's; `CPU` is the same for
rates per second of processor time, which other programs on the machine disturb less. `start` is the time
that the command takes for ten lines, which is part of `ours`.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from common import TEST_DATA

from ftk.data.text.blocks import BLOCK_BYTES
from ftk.data.text.preprocess_config import TextConfig
from ftk.data.text.records import read_documents
from ftk.tokenizers import Tokenizer, build_tokenizer


class Case(NamedTuple):
    name: str
    tokenizer: str
    vocabulary: str
    text: str
    megabytes: int
    options: tuple[str, ...] = ()


CASES = (
    Case("SentencePiece, English", "sentencepiece", "cog-pretrain.model", "english/train.txt", 128),
    Case("SentencePiece, Chinese JSONL", "sentencepiece", "cog-pretrain.model", "chinese/train.jsonl", 512),
    Case("GPT-2 BPE, English", "gpt2_bpe", "gpt2-vocab.json", "english/train.txt", 128),
)
EVERYTHING = (
    *("--dedup", "--normalize", "nfkc", "--min-tokens", "4"),
    *("--append-eos", "--special-tokens", "with_end", "--valid-ratio", "0.01"),
)


def main() -> None:
    options = parse_options()
    cases = [case for case in CASES if options.case.lower() in case.name.lower()]
    if options.all_options:
        cases = [case._replace(name=f"{case.name}, all options", options=EVERYTHING) for case in cases]
    rows = []
    with tempfile.TemporaryDirectory(prefix="ftk-benchmark-", dir=options.folder) as folder:
        for case in cases:
            megabytes = options.megabytes or (8 if options.quick else case.megabytes)
            text = repeated(TEST_DATA / case.text, Path(folder), megabytes * 1_000_000)
            for workers in options.workers:
                row = measure(case, text, workers, 1 if options.quick else options.rounds, Path(folder))
                rows.append(row)
                print(line(row), flush=True)
            text.unlink()
    if options.json:
        machine = {"platform": platform.platform(), "cores": os.cpu_count(), "python": platform.python_version()}
        options.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of processes to try")
    parser.add_argument("--case", default="", help="only the cases whose name holds this, e.g. BPE")
    parser.add_argument("--megabytes", type=int, help="size of each text; default: some ten seconds of work")
    parser.add_argument("--rounds", type=int, default=3, help="times that both run")
    parser.add_argument("--all-options", action="store_true", help=f"ours with {' '.join(EVERYTHING)}")
    parser.add_argument("--quick", action="store_true", help="one round on 8 MB, where starting is much of the time")
    parser.add_argument("--folder", type=Path, help="where temporary files go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, too")
    return parser.parse_args()


def repeated(source: Path, folder: Path, num_bytes: int) -> Path:
    """The text of `source`, again and again, up to about `num_bytes`."""
    path = folder / f"text{source.suffix}"
    content = source.read_bytes()
    with open(path, "wb") as file:
        while file.tell() + len(content) <= num_bytes:
            file.write(content)
        rest = content[: num_bytes - file.tell()]
        file.write(rest[: rest.rfind(b"\n") + 1])
    return path


def measure(case: Case, text: Path, workers: int, rounds: int, folder: Path) -> dict[str, Any]:
    tokenizer = build_tokenizer(case.tokenizer, path=TEST_DATA / "tokenizers" / case.vocabulary)
    few = folder / f"few{text.suffix}"
    with open(text, "rb") as file:
        few.write_bytes(b"".join(file.readline() for _ in range(10)))
    megabytes = text.stat().st_size / 1e6
    results = []
    for _ in range(rounds):
        library = library_seconds(tokenizer, text, workers)
        ours = command_seconds(case, text, workers, folder)
        results.append((library, ours))
    start, _ = command_seconds(case._replace(options=()), few, workers, folder)
    return {
        "case": case.name,
        "workers": workers,
        "megabytes": megabytes,
        "library_mb_per_second": megabytes / min(library[0] for library, _ in results),
        "ours_mb_per_second": megabytes / min(ours[0] for _, ours in results),
        "ratio": statistics.median(library[0] / ours[0] for library, ours in results),
        "ratio_cpu": statistics.median(library[1] / ours[1] for library, ours in results),
        "start_seconds": start,
        "rounds": results,
    }


def library_seconds(tokenizer: Tokenizer, text: Path, workers: int) -> tuple[float, float]:
    """(seconds, processor seconds of all) for encoding the texts of a file in `workers` processes."""
    context = multiprocessing.get_context("fork")
    ready, go = context.Barrier(workers + 1), context.Event()
    cpu = context.Array("d", workers)
    batches = batches_of_text(text)
    processes = [
        context.Process(target=encode_alone, args=(tokenizer, batches[i::workers], i, ready, go, cpu))
        for i in range(workers)
    ]
    for process in processes:
        process.start()
    ready.wait()
    started = time.perf_counter()
    go.set()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return time.perf_counter() - started, sum(cpu)


def encode_alone(tokenizer: Any, batches: list[list[str]], number: int, ready: Any, go: Any, cpu: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.freeze()  # the texts are no concern of the collector
    ready.wait()
    go.wait()
    before = time.process_time()
    for batch in batches:
        if tokenizer.name == "sentencepiece":
            tokenizer._processor.encode(batch, num_threads=1)
        else:
            [encoded.ids for encoded in tokenizer._backend.encode_batch_fast(batch, add_special_tokens=False)]
    cpu[number] = time.process_time() - before


def batches_of_text(text: Path) -> list[list[str]]:
    """The documents of a file, in lists of about `BLOCK_BYTES`."""
    batches: list[list[str]] = []
    end = 0
    for document in read_documents([str(text)], TextConfig()):
        if document.offset >= end:
            batches.append([])
            end = document.offset + BLOCK_BYTES
        batches[-1].append(document.text)
    return batches


def command_seconds(case: Case, text: Path, workers: int, folder: Path) -> tuple[float, float]:
    """(seconds, processor seconds of all its processes) of ftk-preprocess."""
    out = folder / "out"
    command = [sys.executable, "-c", "import sys; from ftk_cli.preprocess import main; sys.exit(main())"]
    command += ["--trainpref", str(text), "--destdir", str(out), "--workers", str(workers), *case.options]
    command += ["--tokenizer", case.tokenizer, "--tokenizer-path", str(TEST_DATA / "tokenizers" / case.vocabulary)]
    before = processor_seconds()
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(done.stderr)
    shutil.rmtree(out)
    return seconds, processor_seconds() - before


def processor_seconds() -> float:
    """Of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['case']:<30} {row['workers']} processes  {row['megabytes']:5.0f} MB  "
        f"library {row['library_mb_per_second']:6.2f} MB/s  ours {row['ours_mb_per_second']:6.2f} MB/s  "
        f"ratio {row['ratio']:.3f}  CPU {row['ratio_cpu']:.3f}  start {row['start_seconds']:.2f} s"
    )


if __name__ == "__main__":
    main()
