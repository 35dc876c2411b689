"""Products of a few rows with a matrix on a CPU, nearly at the rate at which memory gives the matrix."""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
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
"""Multiplications from which one more thread is worth its start."""

FEW_ROWS = 64
"""The most rows (tokens) that do not go to `F.linear`, but to our kernel where it is the fastest, else to oneDNN.

`F.linear` in float32 goes to MKL, which packs the weights again for every product of more than one row: up to twice the
time of oneDNN (`scripts/benchmark/few_rows.py`).
"""

_SMALL_WEIGHT = 1 << 19
"""Values of a weight with which a product of up to a quarter more rows costs less than another program for it."""


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
        if hidden.numel() <= max_few_rows() * hidden.size(-1) and weight.is_contiguous():
            return few_rows_linear(hidden, weight, bias)
        if hidden.dtype == torch.float32 and _has_onednn():
            return _by_onednn(_pointwise, hidden, weight, bias)
        if hidden.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return _by_onednn(F.linear, hidden, weight, bias)
    return F.linear(hidden, weight, bias)


def _by_onednn(
    product: Callable[[Tensor, Tensor, Tensor | None], Tensor], hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """A product of oneDNN with rows of zeros behind the others, so that few numbers of rows occur.

    oneDNN compiles a program for each number of rows and keeps up to 1,024 of them, of 0.5 MB each: a service reads
    together the prompts that have arrived, so that nearly every pass has another number of tokens.
    """
    num_rows = hidden.numel() // hidden.size(-1)
    step = 1 << max((num_rows // (4 if weight.numel() < _SMALL_WEIGHT else 32)).bit_length() - 1, 0)
    added = -num_rows % step
    if not added:
        return product(hidden, weight, bias)
    rows = F.pad(hidden.reshape(num_rows, -1), (0, 0, 0, added))
    return product(rows, weight, bias)[:num_rows].view(*hidden.shape[:-1], -1)


def _pointwise(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(hidden, weight, bias, "none", [], "")


def _has_few_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether this is a product without gradients of few enough rows for another kernel than torch's."""
    return (
        may_be_read_by_address(hidden, weight, bias)  # first: reading sizes would add guards to an export
        and hidden.dtype == weight.dtype in (torch.float32, torch.bfloat16)
        and 0 < hidden.numel() <= _max_rows_of_onednn() * hidden.size(-1)
        and weight.dim() == 2
        and hidden.size(-1) == weight.size(1)
        and (bias is None or (bias.dtype == weight.dtype and bias.shape == weight.shape[:1]))
    )


@cache
def _max_rows_of_onednn() -> float:
    """The most rows that go to oneDNN: any number on a processor with AVX-512 that is not Intel's, where MKL takes
    twice the time."""
    try:
        is_other = b"GenuineIntel" not in Path("/proc/cpuinfo").read_bytes()
    except OSError:
        is_other = False
    return math.inf if is_other and _has_avx512() else FEW_ROWS


@cache
def _has_onednn() -> bool:
    """Tried once: the operator is private to torch, which has it for compiled models."""
    try:
        given, weight = torch.ones(1, 2, 3), torch.ones(4, 3)
        found = torch.ops.mkldnn._linear_pointwise(given, weight, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return found.shape == (1, 2, 4) and bool((found == 3).all())


KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.uint8: 3}
"""Of weights, scales and biases, as `few_rows.h` has them; uint8 is int4, two values a byte."""


def few_rows_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """As `F.linear`: hidden [..., I] times weight [O, I] transposed, times scale, plus bias [O]: [..., O].

    Sums are in float32. What a row gives does not depend on the other rows, nor on the number of threads.

    Args:
        hidden: float32 or bfloat16, contiguous or not; `may_be_read_by_address` is true of all.
        weight: float32 or bfloat16; int8 with a scale; uint8 [O, I / 2] for int4, as of `Int4Linear`.
        bias: float32 or bfloat16.
        scale: of int8, [O], float32 or bfloat16; of int4, bfloat16 [I / G, O, 2].
    """
    inputs = hidden.size(-1)
    num_rows, outputs = hidden.numel() // inputs, weight.size(0)
    assert weight.numel() * (2 if weight.dtype == torch.uint8 else 1) == outputs * inputs, (
        f"{inputs} inputs for a weight of {tuple(weight.shape)}"
    )
    rows, weight = hidden.contiguous().float(), weight.contiguous()
    scale, bias = (None if part is None else part.contiguous() for part in (scale, bias))
    result = rows.new_empty(*hidden.shape[:-1], outputs)
    threads = num_threads(num_rows * outputs * inputs)
    matrix_of(weight, bias, scale, inputs).product(rows.data_ptr(), num_rows, result.data_ptr(), threads)
    return result.to(hidden.dtype)


def num_threads(products: int) -> int:
    """How many share some multiplications."""
    return min(torch.get_num_threads(), 1 + products // _PRODUCTS_OF_A_THREAD)


def matrix_of(weight: Tensor, bias: Tensor | None, scale: Tensor | None, inputs: int) -> _few_rows.Matrix:
    """What the kernels get of contiguous tensors, see `few_rows_linear`; it does not keep them."""
    assert (scale is None) is weight.is_floating_point(), f"a weight of {weight.dtype} with scale {scale}"
    return _few_rows.Matrix(
        KINDS[weight.dtype],
        weight.data_ptr(),
        0 if scale is None else KINDS[scale.dtype],
        0 if scale is None else scale.data_ptr(),
        0 if bias is None else KINDS[bias.dtype],
        0 if bias is None else bias.data_ptr(),
        weight.size(0),
        inputs,
        1 if scale is None else inputs // scale.size(0),
    )


def may_be_read_by_address(*tensors: Tensor | None, device: str = "cpu") -> bool:
    """Whether these are plain memory of the CPU, or of another type of device, and nothing (autograd, a tracer) records
    what is computed with them.

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
        and not torch.is_autocast_enabled(device)
        and all(tensor is None or _is_plain(tensor, device) for tensor in tensors)
    )


def _is_plain(tensor: Tensor, device: str) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter)  # one that wraps a tensor of another kind has that kind's type
        and tensor.device.type == device
        and tensor.layout == torch.strided
        and not tensor.is_neg()
    )


@cache
def max_few_rows() -> int:
    """The greatest number of rows at which this is the fastest way on this processor; 0 where it is not available.

    Beyond them oneDNN, which packs weights once for many rows, is ahead: `scripts/benchmark/few_rows.py`.
    """
    if not (_few_rows.use_level(-1) and _has_torchs_openmp()):
        return 0
    return 16 if _has_avx512() else 32


def _has_avx512() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _has_torchs_openmp() -> bool:
    """Whether torch and the kernels share the threads of one OpenMP library; those of two would wait for cores.

    Both are asked which one they call: a wheel may bring a copy of its own (sentencepiece does), which neither uses.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        of_torch = ctypes.CDLL(torch._C.__file__).omp_get_num_threads  # in what torch was loaded with
    except (AttributeError, OSError):
        return False
    return ctypes.cast(of_torch, ctypes.c_void_p).value == _few_rows.openmp()
