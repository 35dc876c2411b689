"""Products of a few rows in float32 on a CPU: our kernel, oneDNN's, and MKL's, which `F.linear` takes.

    python scripts/benchmark/few_rows.py              # glm_base's shapes, two threads
    python scripts/benchmark/few_rows.py --threads 1

The matrices of some layers, more than the caches hold, are multiplied one after the other; the ways take turns, and the
best of --rounds counts. GB/s: the bytes of the matrices by our time.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
from common import best_of
from torch import Tensor
from torch.nn import functional as F

from ftk.modules.few_rows import few_rows_linear, max_few_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 48, 64])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    if not max_few_rows():
        parser.exit(1, "our kernel cannot be had here (x86-64 with AVX2, Linux, the OpenMP library of torch)\n")
    torch.set_num_threads(arguments.threads)
    size = arguments.hidden_size
    shapes = [(3 * size, size), (size, size), (4 * size, size), (size, 4 * size)] * arguments.layers
    weights = [torch.randn(shape) for shape in shapes]
    megabytes = sum(weight.nbytes for weight in weights) / 1e6
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "ours": few_rows_linear,
        "oneDNN": lambda hidden, weight: torch.ops.mkldnn._linear_pointwise(hidden, weight, None, "none", [], ""),
        "MKL": F.linear,
    }
    print(f"{megabytes:.0f} MB, {arguments.threads} threads, {torch.backends.cpu.get_cpu_capability()}; milliseconds")
    print(f"{'rows':>4}" + "".join(f"{name:>9}" for name in ways) + f"{'GB/s':>8}{'of the best other':>19}")
    with torch.inference_mode():
        for rows in arguments.rows:
            inputs = {width: torch.randn(rows, width) for width in (size, 4 * size)}
            runs = {name: partial(products, way, inputs, weights) for name, way in ways.items()}
            best = best_of(runs, arguments.rounds)
            own, *others = best.values()
            columns = "".join(f"{1e3 * seconds:>9.2f}" for seconds in best.values())
            print(f"{rows:>4}{columns}{megabytes / 1e3 / own:>8.1f}{own / min(others):>18.0%}", flush=True)


def products(way: Callable[[Tensor, Tensor], Tensor], inputs: dict[int, Tensor], weights: list[Tensor]) -> None:
    for weight in weights:
        way(inputs[weight.size(1)], weight)


if __name__ == "__main__":
    main()
