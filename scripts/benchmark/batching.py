"""Batching and ordering: a million sizes cut into batches, epochs planned, corpora blended.

    python scripts/benchmark/batching.py
    python scripts/benchmark/batching.py --quick --json out.json

The naive way, in this file: the plain Python loop over samples that fairseq had before its Cython `batch_by_size`,
and for blends the same greedy rule one sample after the other in NumPy. Both ways run in turn, several rounds; the
figures are of each way's best round. The naive way gets fewer samples and its time is scaled up (it is linear).

The goal for batching is 0.10 s for a million sizes on the reference machine (fairseq's Cython there). How fast this
machine is beside it is measured by a calibration loop: CALIBRATION_SECONDS is what the loop takes on the reference
machine when it is quiet; the goal is scaled by the ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ftk.data.batches.batching import batch_by_size
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.corpora._blending import blend_corpora

GOAL_SECONDS = 0.10
CALIBRATION_SECONDS = 0.027  # quiet: a busy machine needs 0.04, which would make the goal easier than it is


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    options = parser.parse_args()
    samples, rounds = (100_000, 2) if options.quick else (1_000_000, 7)

    calibration = min(timed(calibration_loop) for _ in range(rounds))
    goal = GOAL_SECONDS * calibration / CALIBRATION_SECONDS * samples / 1_000_000
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; calibration loop {calibration:.4f} s")
    print(f"({CALIBRATION_SECONDS} s on the reference machine), so the goal for {samples:,} sizes is {goal:.4f} s\n")
    rows = [*batching_rows(samples, rounds), blending_row(samples, rounds)]
    print(f"{'task':<50} {'ours, s':>9} {'naive, s':>9} {'ratio':>7}")
    for row in rows:
        print(f"{row['task']:<50} {row['seconds']:>9.4f} {row['naive_seconds']:>9.3f} {row['ratio']:>7.0f}")
    worst = max(row["seconds"] for row in rows if "batch" in row["task"])
    print(f"\nbatching: worst {worst:.4f} s, goal {goal:.4f} s: {'reached' if worst <= goal else 'missed'}\n")

    plans = [plan_row(count, options_) for count in plan_sizes(options.quick) for options_ in PLANS]
    print(f"{'an epoch of':<14} {'order':<34} {'batches':>9} {'plan, s':>8} {'request, us':>12} {'peak MB':>8}")
    for plan in plans:
        print(
            f"{plan['samples']:<14,} {plan['order']:<34} {plan['batches']:>9,} {plan['seconds']:>8.3f} "
            f"{plan['request_us']:>12.2f} {plan['peak_mb']:>8.0f}"
        )
    if options.json:
        figures = {"calibration_seconds": calibration, "goal_seconds": goal, "rows": rows, "plans": plans}
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def batching_rows(samples: int, rounds: int) -> list[dict[str, Any]]:
    """Sizes as text gives them (log-normal), in random order and sorted, under three kinds of limits."""
    sizes = np.minimum(np.random.default_rng(1).lognormal(5.0, 0.7, samples), 1024).astype(np.int32)
    some = sizes[: max(1, samples // 10)]
    rows = []
    for name, limits in (
        ("batches by 8192 tokens", {"max_tokens": 8192}),
        ("batches by 32 samples", {"batch_size": 32}),
        ("batches by both, in multiples of 8", {"max_tokens": 8192, "batch_size": 64, "multiple": 8}),
    ):
        for order, ordered, few in (("random", sizes, some), ("sorted", np.sort(sizes), np.sort(some))):
            ours = naive = float("inf")
            for _ in range(rounds):
                ours = min(ours, timed(lambda ordered=ordered, limits=limits: ours_batching(ordered, **limits)))
                taken = timed(lambda few=few, limits=limits: naive_batching(few.tolist(), **limits))
                naive = min(naive, taken * len(sizes) / len(some))
            assert ours_batching(few, **limits).tolist() == naive_batching(few.tolist(), **limits)
            rows.append(row(f"{name}, {order} order", ours, naive))
    return rows


def blending_row(samples: int, rounds: int) -> dict[str, Any]:
    shares = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    some = samples // 50
    ours = naive = float("inf")
    for _ in range(min(rounds, 3)):
        ours = min(ours, timed(lambda: blend_corpora(shares, samples)))
        naive = min(naive, timed(lambda: naive_blend(shares, some)) * samples / some)
    assert blend_corpora(shares, some).tolist() == naive_blend(shares, some)
    return row("5 corpora blended", ours, naive)


PLANS: list[dict[str, int]] = [{}, {"bucket_window": 10_000}, {"short_first": -1}]


def plan_sizes(quick: bool) -> list[int]:
    return [100_000] if quick else [1_000_000, 10_000_000]


class Sizes:
    """A dataset that has nothing but sizes."""

    def __init__(self, count: int) -> None:
        lengths = np.minimum(np.random.default_rng(1).lognormal(5.0, 0.7, 1_000_000), 1024).astype(np.int32)
        self.lengths_of_samples = np.resize(lengths, count)

    def __len__(self) -> int:
        return len(self.lengths_of_samples)

    def sizes(self, epoch: int) -> np.ndarray:
        return self.lengths_of_samples

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        return {}


def plan_row(samples: int, options: dict[str, int]) -> dict[str, Any]:
    """The cost of an epoch's order and batches, and of handing out one batch's numbers; memory in a fresh process."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        dataset = Sizes(samples)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        iterator = EpochBatchIterator(dataset, list, max_tokens=8192, **options)  # type: ignore[arg-type]
        began = time.perf_counter()
        batches = iterator.batches_left()
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        for _ in iterator.requests():
            pass
        request = (time.perf_counter() - began) / batches
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        os.write(writer, json.dumps([batches, seconds, request * 1e6, peak]).encode())
        os._exit(0)
    os.waitpid(child, 0)
    batches, seconds, request_us, peak = json.loads(os.read(reader, 4096))
    order = ", ".join(f"{name} {value}" for name, value in options.items()) or "shuffled"
    names = ("samples", "order", "batches", "seconds", "request_us", "peak_mb")
    return dict(zip(names, (samples, order, batches, seconds, request_us, peak), strict=True))


def ours_batching(sizes: np.ndarray, multiple: int = 1, **limits: int) -> np.ndarray:
    return batch_by_size(sizes, required_batch_size_multiple=multiple, **limits)


def naive_batching(
    sizes: list[int], batch_size: int | None = None, max_tokens: int | None = None, multiple: int = 1
) -> list[int]:
    """One sample after the other."""
    bounds, start = [0], 0
    while start < len(sizes):
        longest, stop = 0, start
        while stop < len(sizes):
            length = max(longest, sizes[stop])
            if batch_size is not None and stop - start == batch_size:
                break
            if max_tokens is not None and length * (stop - start + 1) > max_tokens and stop > start:
                break
            longest = length
            stop += 1
        if stop - start > multiple:
            stop -= (stop - start) % multiple
        bounds.append(stop)
        start = stop
    return bounds


def naive_blend(shares: np.ndarray, count: int) -> list[int]:
    least = 1 / (2 * len(shares) - 2)
    counts, chosen = np.zeros(len(shares)), []
    for place in range(1, count + 1):
        lags = shares * place - counts
        able = np.flatnonzero(lags >= least - 1e-9)
        chosen.append(int(able[int(((1 - least - lags[able]) / shares[able]).argmin())]))
        counts[chosen[-1]] += 1
    return chosen


def calibration_loop() -> int:
    total = 0
    for number in range(1_000_000):
        total += number & 7
    return total


def row(task: str, seconds: float, naive_seconds: float) -> dict[str, Any]:
    return {"task": task, "seconds": seconds, "naive_seconds": naive_seconds, "ratio": naive_seconds / seconds}


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
