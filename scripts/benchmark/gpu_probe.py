"""Short looks at a device, each in seconds, for what the benchmarks' figures depend on (`scripts/gpu_check.sh`).

    python scripts/benchmark/gpu_probe.py machine rates attention waits profile decode --json out.json

machine: versions, memory. rates: matrix products of GLM's layers in bf16, copies, reads: the ceilings of all figures.
attention: which of PyTorch's kernels takes the shapes that ftk has, times of PyTorch's call and of ftk's, and of the
first three calls with one key more each, as decoding without buckets has them, with and without cuDNN. waits: calls of
three updates in which the host waits for the GPU, each place once. profile: kernels and launches of three updates, and
the share of the time in which the GPU works. decode: the same of the steps of greedy answers, for one prompt and for
--batch-size, and the Python functions in which the host spends them.

Figures go to --json after each look. A look that fails is reported, the others continue, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import collections
import cProfile
import io
import itertools
import json
import platform
import pstats
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from matrix_rate import best_seconds, linear_products, matrix_rate, synchronize
from step_ways import Way, build_step, make_batches, model_config
from torch.autograd import DeviceType
from torch.nn import functional as F
from train_step import SIZES

from ftk.generation.engine.decoder import CachedDecoder
from ftk.models.glm.model import GLM
from ftk.modules.few_rows_layer import prepare
from ftk.modules.masked_attention import fused_attention
from ftk.tasks.glm_blank import BlankGenerator

UPDATES = 3
FIRST, LAST = 16, 64  # steps of an answer that are looked at
SPECIAL = SimpleNamespace(sop=1, eop=2, mask=3)
BACKENDS = {-1: "error", 0: "math", 1: "flash", 2: "efficient", 3: "cudnn", 4: "overrideable"}
Figures = dict[str, Any]


def main() -> int:
    options = parse()
    figures: Figures = {}
    failed = False
    for name in options.looks:
        try:
            figures[name] = LOOKS[name](options, torch.device(options.device))
        except Exception as error:  # the other looks are still worth having; the file says what happened
            traceback.print_exc()
            figures[name] = {"error": f"{type(error).__name__}: {error}"}
            failed = True
        print(f"{name}: {json.dumps(figures[name], indent=1, default=str)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(figures, indent=1, default=str) + "\n", encoding="utf-8")
    return int(failed)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("looks", nargs="+", choices=LOOKS)
    parser.add_argument("--size", choices=SIZES, default="large", help="of the model; default: large")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--precision", default="bf16", choices=("fp32", "bf16", "fp16"))
    parser.add_argument("--compile", default="none", choices=("none", "block", "model"), help="as in ftk-train")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--attention", default="auto", choices=("auto", "sdpa", "varlen", "flex", "eager"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def machine(options: argparse.Namespace, device: torch.device) -> Figures:
    found: Figures = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "mib": properties.total_memory // 2**20}
        found |= {"capability": torch.cuda.get_device_capability(device), "cudnn": torch.backends.cudnn.version()}
    return found


def rates(options: argparse.Namespace, device: torch.device) -> Figures:
    shape, _, num_tokens = SIZES[options.size]
    config = model_config(shape, num_tokens, 0.0)
    rows = options.batch_size * num_tokens
    products = linear_products(config, rows, round(0.18 * rows))
    block = torch.ones((512 if device.type == "cuda" else 64) * 2**20 // 4, device=device)
    copy = torch.empty_like(block)
    return {
        "matrix_tflops_bf16": matrix_rate(products, torch.bfloat16, device) / 1e12,
        "copy_gb_per_second": 2e-9 * block.nbytes / best_seconds(lambda: copy.copy_(block), device, 3),
        "read_gb_per_second": 1e-9 * block.nbytes / best_seconds(block.sum, device, 3),
    }


def attention(options: argparse.Namespace, device: torch.device) -> Figures:
    dtype, size = torch.bfloat16, 64

    def tensors(rows: int, queries: int, keys: int, key_heads: int = 16) -> list[torch.Tensor]:
        shapes = ((16, queries), (key_heads, keys), (key_heads, keys))
        return [torch.randn(rows, heads, count, size, device=device, dtype=dtype) for heads, count in shapes]

    def mask(rows: int, queries: int, keys: int, kind: torch.dtype) -> torch.Tensor:
        if kind == torch.bool:
            return torch.ones(rows, 1, queries, keys, device=device, dtype=torch.bool).tril(keys - queries)
        return torch.zeros(rows, 1, queries, keys, device=device, dtype=kind)

    found: Figures = {}
    for name, shape, key_heads, kind, dropout in (
        ("training, boolean mask", (8, 512, 512), 16, torch.bool, 0.0),
        ("training, boolean mask, dropout 0.1", (8, 512, 512), 16, torch.bool, 0.1),
        ("decoding, additive mask", (8, 1, 320), 16, dtype, 0.0),
        ("decoding, 2048 keys", (8, 1, 2048), 16, dtype, 0.0),
        ("decoding, 2 key heads", (8, 1, 320), 2, dtype, 0.0),
    ):
        given, seen = tensors(*shape, key_heads), mask(*shape, kind)
        chosen = torch._fused_sdp_choice(*given, seen, dropout, enable_gqa=key_heads != 16)
        with cudnn_attention(False):
            calls = {
                "as ftk calls it": lambda given=given, seen=seen, dropout=dropout: fused_attention(
                    *given, seen, dropout=dropout
                ),
                "by PyTorch": lambda given=given, seen=seen, dropout=dropout: F.scaled_dot_product_attention(
                    *given, attn_mask=seen, dropout_p=dropout, enable_gqa=True
                ),
            }
            times = {f"ms, {way}": 1e3 * best_seconds(call, device, 3) for way, call in calls.items()}
        found[name] = {"kernel of PyTorch": BACKENDS.get(chosen, chosen), **times}
    # Keys one longer in each call; with cuDNN last, whose plans stay.
    new = {}
    for cudnn, first in ((False, 300), (True, 400)):
        with cudnn_attention(cudnn):
            new["with cuDNN" if cudnn else "without cuDNN"] = [
                _milliseconds(tensors(8, 1, keys), mask(8, 1, keys, dtype), device) for keys in range(first, first + 3)
            ]
    return {"kernels": found, "ms_of_new_lengths": new}


@contextmanager
def cudnn_attention(on: bool) -> Iterator[None]:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(on)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def _milliseconds(given: list[torch.Tensor], mask: torch.Tensor, device: torch.device) -> float:
    """Of one call."""
    synchronize(device)
    began = time.perf_counter()
    F.scaled_dot_product_attention(*given, attn_mask=mask)
    synchronize(device)
    return 1e3 * (time.perf_counter() - began)


def _updates(options: argparse.Namespace, device: torch.device) -> Callable[[], None]:
    """What takes `UPDATES` updates of the model; kernels are compiled and states made."""
    shape, _, num_tokens = SIZES[options.size]
    config = model_config(shape, num_tokens, options.dropout)
    way = Way("ftk", options.precision, attention=options.attention, compile=options.compile)
    step = build_step(way, config, device)
    batches = make_batches(config, options.batch_size, num_tokens, UPDATES)

    def run() -> None:
        for batch in batches:
            step.step(batch)

    run()
    synchronize(device)
    return run


def waits(options: argparse.Namespace, device: torch.device) -> Figures:
    if device.type != "cuda":
        return {"not run": "needs CUDA"}
    run = _updates(options, device)
    places: collections.Counter[str] = collections.Counter()

    def noted(message: Warning | str, *given: Any, **options: Any) -> None:
        if "synchroniz" in str(message):
            places[" < ".join(_place(one) for one in reversed(traceback.extract_stack()[-7:-2]))] += 1

    show, warnings.showwarning = warnings.showwarning, noted  # type: ignore[assignment]
    warnings.simplefilter("always")
    torch.cuda.set_sync_debug_mode("warn")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        warnings.showwarning = show
    return {"waits_per_update": sum(places.values()) / UPDATES, "places": dict(places.most_common(20))}


def _place(frame: traceback.FrameSummary) -> str:
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno}"


def profile(options: argparse.Namespace, device: torch.device) -> Figures:
    run = _updates(options, device)
    kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=kinds):  # which loads what profiles, and is no part of the time
        run()
        synchronize(device)
    with torch.profiler.profile(activities=kinds) as seen:
        began = time.perf_counter()
        run()
        synchronize(device)
        seconds = time.perf_counter() - began
    return {"seconds_per_update_profiled": seconds / UPDATES, **_costs(seen, device, seconds, UPDATES)}


def _costs(seen: torch.profiler.profile, device: torch.device, seconds: float, count: int) -> Figures:
    """What took longest in `count` updates or steps, per update or step; of a GPU its launches, and how busy it was."""
    on_gpu = device.type == "cuda"
    averages = seen.key_averages()
    kernels = [one for one in averages if one.device_type == DeviceType.CUDA and not one.is_user_annotation]
    listed, cost = (kernels, "self_device_time_total") if on_gpu else (list(averages), "self_cpu_time_total")
    listed.sort(key=lambda one: getattr(one, cost), reverse=True)
    figures: Figures = {
        "longest": [
            f"{1e-3 * getattr(one, cost) / count:.3f} ms, {one.count / count:g} x {one.key[:90]}" for one in listed[:30]
        ]
    }
    if on_gpu:
        calls = [one for one in averages if "Launch" in one.key or "Memcpy" in one.key or "Synchronize" in one.key]
        figures["calls"] = {one.key: one.count / count for one in calls if one not in kernels}
        figures["kernels"] = sum(one.count for one in kernels) / count
        figures["gpu_ms"] = sum(one.self_device_time_total for one in kernels) / 1e3 / count
        figures["gpu_busy"] = sum(one.self_device_time_total for one in kernels) / 1e6 / seconds
    return figures


def decode(options: argparse.Namespace, device: torch.device) -> Figures:
    shape, _, num_tokens = SIZES[options.size]
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[options.precision]
    model = GLM(model_config(shape, num_tokens, 0.0), seed=1).eval().to(device, dtype)
    prepare(model)
    generator = BlankGenerator(model, SPECIAL, min_len=LAST + 2, max_len=LAST + 2)
    found: Figures = {}
    for count in dict.fromkeys((1, options.batch_size)):
        prompts = torch.randint(10, 1000, (count, 40)).tolist()
        for prompt in prompts:
            prompt[20] = SPECIAL.mask
        _seconds_of_steps(generator, prompts, device)
        seconds = min(_seconds_of_steps(generator, prompts, device) for _ in range(3))
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
        seen, host, text = torch.profiler.profile(activities=kinds), cProfile.Profile(), io.StringIO()
        profiled = _seconds_of_steps(generator, prompts, device, seen)
        _seconds_of_steps(generator, prompts, device, host)
        pstats.Stats(host, stream=text).sort_stats("tottime").print_stats(22)
        print(f"{count} prompts: the host in {LAST - FIRST} steps\n{text.getvalue()}")
        costs = _costs(seen, device, profiled, LAST - FIRST)
        each = {"ms_per_step": 1e3 * seconds / (LAST - FIRST), "ms_profiled": 1e3 * profiled / (LAST - FIRST)}
        found[f"{count} prompts"] = {**each, **costs}
    return found


def _seconds_of_steps(
    generator: BlankGenerator,
    prompts: list[list[int]],
    device: torch.device,
    look: torch.profiler.profile | cProfile.Profile | None = None,
) -> float:
    """Of the steps from FIRST to LAST of answers, in which one looks."""
    at: list[float] = []
    number, step = itertools.count(), CachedDecoder.step

    def counted(self: CachedDecoder, tokens: torch.Tensor) -> torch.Tensor:
        mine = next(number)
        if mine == LAST:
            synchronize(device)
            at.append(time.perf_counter())
            if look is not None:
                look.__exit__(None, None, None)
        if mine == FIRST:
            synchronize(device)
            if look is not None:
                look.__enter__()
            at.append(time.perf_counter())
        return step(self, tokens)

    CachedDecoder.step = counted  # type: ignore[method-assign]
    try:
        generator.fill_ids(prompts)
    finally:
        CachedDecoder.step = step  # type: ignore[method-assign]
    return at[1] - at[0]


LOOKS: dict[str, Callable[[argparse.Namespace, torch.device], Figures]] = {
    "machine": machine,
    "rates": rates,
    "attention": attention,
    "waits": waits,
    "profile": profile,
    "decode": decode,
}

if __name__ == "__main__":
    sys.exit(main())
