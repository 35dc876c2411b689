"""Products of a few rows with a matrix on a CPU, at the rate at which memory gives the matrix."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from ftk.modules import _few_rows

_PRODUCTS_OF_A_THREAD = 1 << 16
"""Multiplications for which it is worth to wake one more thread (20 microseconds of one)."""


def few_rows_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `F.linear`: hidden [..., I] times weight [O, I] transposed, plus bias [O]: [..., O].

    What a row gives does not depend on the other rows, nor on the number of threads.

    Args:
        hidden, weight, bias: contiguous or not, float32, on the CPU; nothing here has gradients.
    """
    (outputs, inputs), num_rows = weight.shape, hidden.numel() // weight.size(1)
    assert hidden.size(-1) == inputs, f"{hidden.size(-1)} inputs for a weight of {inputs}"
    hidden, weight = hidden.contiguous(), weight.contiguous()
    bias = None if bias is None else bias.contiguous()
    result = torch.empty(*hidden.shape[:-1], outputs)
    num_products = num_rows * outputs * inputs
    _few_rows.product(
        hidden.data_ptr(),
        num_rows,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        outputs,
        inputs,
        result.data_ptr(),
        min(torch.get_num_threads(), 1 + num_products // _PRODUCTS_OF_A_THREAD),
    )
    return result


@cache
def most_rows() -> int:
    """Up to so many rows this is the fastest way on this processor; 0 where it cannot be had.

    AVX2 (EPYC without AVX-512), the linear layers of six layers of glm_base, 170 MB, milliseconds of oneDNN and of this
    on two threads: 1 row 9.4 and 7.5, 2 rows 14.7 and 7.7, 4 rows 16.4 and 9.6, 8 rows 20.7 and 13.2, 16 rows 23.1 and
    14.7, 32 rows 32.7 and 25.8, 64 rows 50.9 and 45.6. Where oneDNN has AVX-512 it multiplies twice as fast, so that it
    is ahead as soon as multiplying, not reading, takes the time.
    """
    if not (_few_rows.is_supported() and _few_rows.is_threaded() and _has_one_openmp()):
        return 0
    return 8 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 64


def _has_one_openmp() -> bool:
    """Whether torch and this extension share the threads of one OpenMP library; those of two would wait for cores."""
    if not sys.platform.startswith("linux"):
        return False
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    names = ("libgomp", "libomp", "libiomp5")
    return len({line.split(maxsplit=5)[5] for line in lines if line.rpartition("/")[2].startswith(names)}) == 1
