"""Log-likelihoods in lm-evaluation-harness: its own model `hf` beside `ftk`, on the same random weights of GPT-2.

    pip install 'ftk[harness]' transformers accelerate
    python scripts/benchmark/evaluation.py --tokenizer GPT2 --lambada lambada_test.jsonl --boolq val.jsonl

GPT2 is a folder with tokenizer.json, or with vocab.json and merges.txt. Requests are those of the harness: the last
word of each of LAMBADA's passages, and " no" and " yes" behind BoolQ's passages with their questions. The two take
turns, in one process on the CPU; the figure is rows a second, of all rounds the median. `hf` runs with each of
--batch-size, and the best of these counts; "CPU time" is the ratio of processor seconds at that, which says more where
other processes run. All find the same log-probabilities, or the command fails.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import GPT2Config, GPT2LMHeadModel

from ftk.evaluation.harness import FTK

SIZES = {"small": {"n_layer": 4, "n_embd": 256, "n_head": 4}, "gpt2": {}}
MOST_APART = 1e-4
"""How much sums of log-probabilities may differ, relative to their sizes: float32 in another order."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True, help="a folder with GPT-2's tokenizer")
    parser.add_argument("--lambada", help="JSON lines with text")
    parser.add_argument("--boolq", help="JSON lines with passage and question")
    parser.add_argument("--size", choices=SIZES, nargs="+", default=[*SIZES], help="of the model")
    parser.add_argument("--rows", type=int, default=64, help="of each data set")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8, 32], help="of hf")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both")
    options = parser.parse_args()
    if not options.lambada and not options.boolq:
        parser.error("give --lambada or --boolq, or both")
    for name in ("rows", "rounds", "threads"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}; it must be 1 or more")
    torch.set_num_threads(options.threads)
    asked = {name: made for name, made in (("lambada", lambada), ("boolq", boolq)) if getattr(options, name)}
    print(f"{options.threads} threads, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}")
    print(f"{'model':<8}{'data':<9}{'ftk rows/s':>12}{'hf rows/s':>11}{'hf batch':>10}{'ratio':>8}{'CPU time':>10}")
    for size in options.size:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), options.tokenizer, SIZES[size])
            own = FTK(path=folder, device="cpu")
            theirs = HFLM(pretrained=folder, device="cpu", dtype="float32")
            for name, made in asked.items():
                with open(getattr(options, name), encoding="utf-8") as lines:
                    requests = [*map(made, map(json.loads, islice(lines, options.rows)))]
                row = compared(own, theirs, requests, options.batch_size, options.rounds)
                print(f"{size:<8}{name:<9}{row}", flush=True)
    return 0


def lambada(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The passage and its last word."""
    context, _, word = row["text"].rpartition(" ")
    return [(context, f" {word}")]


def boolq(row: dict[str, Any]) -> list[tuple[str, str]]:
    """Two answers to one question."""
    context = f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:"
    return [(context, " no"), (context, " yes")]


def compared(own: Any, theirs: Any, rows: list[list[tuple[str, str]]], batch_sizes: list[int], rounds: int) -> str:
    """Cells of the table."""
    pairs = [pair for row in rows for pair in row]
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]

    def by_ftk() -> list[tuple[float, bool]]:
        return own.loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return]

    def by_hf(batch_size: int) -> Callable[[], list[tuple[float, bool]]]:
        def ask() -> list[tuple[float, bool]]:
            theirs.batch_size_per_gpu = batch_size
            return theirs.loglikelihood(requests, disable_tqdm=True)  # type: ignore[no-any-return]

        return ask

    ways = {0: by_ftk, **{size: by_hf(size) for size in batch_sizes}}
    rates: dict[int, list[float]] = {way: [] for way in ways}
    used: dict[int, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        found = {}
        for way, ask in ways.items():
            begun, begun_used = time.perf_counter(), time.process_time()
            found[way] = ask()
            if number:  # the first turn warms up
                rates[way].append(len(rows) / (time.perf_counter() - begun))
                used[way].append(time.process_time() - begun_used)
        for size in batch_sizes:
            check_equal(found[0], found[size])
    rate = {way: statistics.median(own) for way, own in rates.items()}
    best = max(batch_sizes, key=rate.__getitem__)
    less = statistics.median(used[best]) / statistics.median(used[0])
    return f"{rate[0]:>12.2f}{rate[best]:>11.2f}{best:>10}{rate[0] / rate[best]:>8.2f}{less:>10.2f}"


def check_equal(found: list[tuple[float, bool]], expected: list[tuple[float, bool]]) -> None:
    """Ends the command where the two ways say different things."""
    for (own, _), (theirs, _) in zip(found, expected, strict=True):
        if abs(own - theirs) > MOST_APART * max(1.0, abs(theirs)):
            sys.exit(f"log-probabilities differ: {own} by ftk, {theirs} by hf")


def write_model(folder: Path, tokenizer: str, shape: dict[str, int]) -> None:
    """A GPT-2 with random weights, and its tokenizer, as transformers writes them."""
    torch.manual_seed(1)
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(folder)
    source, end = Path(tokenizer), "<|endoftext|>"
    if (source / "tokenizer.json").exists():
        made = tokenizers.Tokenizer.from_file(str(source / "tokenizer.json"))
    else:
        files = [next(source.glob(f"*{name}")) for name in ("vocab.json", "merges.txt")]
        made = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(*map(str, files)))
        made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = tokenizers.decoders.ByteLevel()
        made.add_special_tokens([end])
    made.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": end,
        "bos_token": end,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 1024,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    raise SystemExit(main())
