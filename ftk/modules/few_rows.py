"""Products of a few rows with a matrix on a CPU, nearly at the rate at which memory gives the matrix."""

from __future__ import annotations

import math
import sys
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ftk.modules import _few_rows
from ftk.modules.embeddings import TiedEmbedding

_PRODUCTS_OF_A_THREAD = 1 << 16
"""Multiplications for which it is worth to wake one more thread (20 microseconds of one)."""

FEW_ROWS = 64
"""The most rows (tokens) that do not go to `F.linear`, but to our kernel where it is the fastest, else to oneDNN.

`F.linear` in float32 goes to MKL, which packs the weights again for every product of more than one row: up to twice the
time of oneDNN (`scripts/benchmark/few_rows.py`).
"""


def prepare(model: nn.Module) -> None:
    """Makes a model's products fast where a step of generation has only a few rows for them, in place.

    Its linear layers and the tied output layer choose the fastest kernel in each call. Parameters stay as they are, and
    so do values up to rounding; where there are gradients, torch's own kernels are used.
    """
    for part in model.modules():
        part.__class__ = {nn.Linear: FewRowsLinear, TiedEmbedding: FewRowsEmbedding}.get(type(part), type(part))


class FewRowsLinear(nn.Linear):
    """`nn.Linear`, by `linear`; same parameters, same values."""

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O]"""
        return linear(hidden, self.weight, self.bias)


class FewRowsEmbedding(TiedEmbedding):
    """`TiedEmbedding` with its output layer by `linear`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V]; there is no bias."""
        return linear(hidden, self.weight)


def linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., I] times weight [O, I] transposed, plus bias [O]: [..., O], by the fastest kernel."""
    if _has_few_rows(hidden, weight, bias):
        if hidden.numel() <= most_rows() * hidden.size(-1) and weight.is_contiguous():
            return few_rows_linear(hidden, weight, bias)
        if _has_onednn():
            return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")
    return F.linear(hidden, weight, bias)


def _has_few_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this is a product in float32, without gradients, of few enough rows for another kernel than MKL's."""
    return (
        may_be_read_by_address(hidden, weight, bias)  # first: reading sizes would add guards to an export
        and hidden.dtype == weight.dtype == torch.float32
        and 0 < hidden.numel() <= _most_rows_of_onednn() * hidden.size(-1)
        and weight.dim() == 2
        and hidden.size(-1) == weight.size(1)
        and (bias is None or (bias.dtype == torch.float32 and bias.shape == weight.shape[:1]))
    )


@cache
def _most_rows_of_onednn() -> float:
    """The most rows that go to oneDNN: any number on a processor with AVX-512 that is not Intel's, as MKL takes twice
    the time there (an AMD EPYC: 93 against 205 billion operations a second and core).
    """
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512"):
        return FEW_ROWS
    try:
        is_intel = b"GenuineIntel" in Path("/proc/cpuinfo").read_bytes()
    except OSError:
        return FEW_ROWS
    return FEW_ROWS if is_intel else math.inf


@cache
def _has_onednn() -> bool:
    """Tried once: the operator is private to torch, which has it for compiled models."""
    try:
        given, weight = torch.ones(1, 2, 3), torch.ones(4, 3)
        found = torch.ops.mkldnn._linear_pointwise(given, weight, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return found.shape == (1, 2, 4) and bool((found == 3).all())


def few_rows_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """As `F.linear`: hidden [..., I] times weight [O, I] transposed, times scale [O], plus bias [O]: [..., O].

    What a row gives does not depend on the other rows, nor on the number of threads.

    Args:
        hidden, weight, bias: contiguous or not; float32, of these shapes; `may_be_read_by_address` is true of them.
        scale: float32, one an output, of a weight that is int8.
    """
    (outputs, inputs), num_rows = weight.shape, hidden.numel() // weight.size(1)
    assert hidden.size(-1) == inputs, f"{hidden.size(-1)} inputs for a weight of {inputs}"
    assert weight.dtype == (torch.float32 if scale is None else torch.int8), f"a weight of {weight.dtype}"
    hidden, weight = hidden.contiguous(), weight.contiguous()
    scale, bias = (None if part is None else part.contiguous() for part in (scale, bias))
    result = hidden.new_empty(*hidden.shape[:-1], outputs)
    num_products = num_rows * outputs * inputs
    _few_rows.product(
        hidden.data_ptr(),
        num_rows,
        weight.data_ptr(),
        0 if scale is None else scale.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        outputs,
        inputs,
        result.data_ptr(),
        min(torch.get_num_threads(), 1 + num_products // _PRODUCTS_OF_A_THREAD),
    )
    return result


def may_be_read_by_address(*tensors: Tensor | None) -> bool:
    """Whether these are plain memory of the CPU, and nothing (autograd, a tracer) records what is computed with them.

    A kernel that gets addresses supports no gradients, no transforms of functions and no tensors of other kinds
    (DTensor, fake, sparse), and is not recorded as an operator.
    """
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
        and not is_in_torch_dispatch_mode()
        and not torch.is_grad_enabled()
        and forward_ad._current_level < 0
        and not torch._C._are_functorch_transforms_active()
        and not torch.is_autocast_enabled("cpu")
        and all(tensor is None or _is_plain(tensor) for tensor in tensors)
    )


def _is_plain(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)  # one that wraps a tensor of another kind has that kind's type
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and not tensor.is_neg()
    )


@cache
def most_int8_rows() -> int:
    """As `most_rows`, for int8 weights, against PyTorch's packed kernel, which is made for AVX-512 and bfloat16.

    Milliseconds of both on that EPYC, twelve layers of 768: 1 row 6.4 and 10.3, 4 rows 8.3 and 15.6, 16 rows 20.0
    and 45.4.
    """
    return 16 if most_rows() and not _has_avx512() else 0


@cache
def most_rows() -> int:
    """The greatest number of rows at which this is the fastest way on this processor; 0 where it is not available.

    Milliseconds of this, oneDNN and MKL by `scripts/benchmark/few_rows.py` on two threads with AVX2 (an EPYC with noisy
    neighbours): 1 row 11.0, 11.9, 15.0; 2 rows 8.7, 17.1, 29.9; 4 rows 11.2, 25.4, 29.6; 8 rows 11.9, 20.7, 34.6; 16
    rows 19.5, 24.6, 33.7; 32 rows 29.0, 33.1, 43.6; 64 rows 55.7, 49.7, 60.1. Where oneDNN has AVX-512 it multiplies
    twice as fast, so that it is ahead as soon as multiplying, not reading, takes the time.
    """
    if not (_few_rows.is_supported() and _few_rows.is_threaded() and _has_one_openmp()):
        return 0
    return 8 if _has_avx512() else 32


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _has_one_openmp() -> bool:
    """Whether torch and this extension share the threads of one OpenMP library; those of two would wait for cores."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # a sandbox without /proc
        return False
    names = ("libgomp", "libomp", "libiomp5")
    return len({line.split(maxsplit=5)[5] for line in lines if line.rpartition("/")[2].startswith(names)}) == 1
