"""A pre-norm layer that computes a generation step by kernels of ours: one call on a CPU, five on an NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ftk.modules import _few_rows
from ftk.modules.attention import Attend, Attention
from ftk.modules.embeddings import TiedEmbedding
from ftk.modules.feed_forward import ACTIVATIONS, FeedForward, GatedFeedForward
from ftk.modules.few_rows import (
    KINDS,
    FewRowsEmbedding,
    FewRowsLinear,
    matrix_of,
    max_few_rows,
    may_be_read_by_address,
    num_threads,
)
from ftk.modules.flex_attention import HAS_TRITON
from ftk.modules.kv_cache import StepAttend
from ftk.modules.norms import RMSNorm
from ftk.modules.quantized_linear import Int4Linear, Int8Linear
from ftk.modules.rotary import RotaryAttention
from ftk.modules.transformer_layer import TransformerLayer

if TYPE_CHECKING:
    from ftk.modules.few_rows_triton import LayerKernels

    _Kernel = tuple[_few_rows.Layer, int] | LayerKernels  # of a CPU with its multiplications a row

_ACTIVATIONS = ("gelu_tanh", "relu", "silu")
"""In the order in which `few_rows.h` has them."""


_CPU_ROWS = 32
_MORE_CPU_ROWS, _MAX_PRODUCTS = 64, 1 << 26
"""Rows that one call takes on a CPU; and more rows, of layers with few multiplications. oneDNN's products would be as
fast or faster with more than 16, but not by as much as the time in which 25 operators are called.
"""


def prepare(model: nn.Module) -> None:
    """Makes a model's products fast where a step of generation has only a few rows for them, in place.

    Its linear layers and the tied output layer choose the fastest kernel in each call, and pre-norm layers make a step
    in one call where they can (`FewRowsLayer`). Parameters stay as they are, and so do values up to
    rounding; where there are gradients, torch's own kernels are used.
    """
    own = {nn.Linear: FewRowsLinear, TiedEmbedding: FewRowsEmbedding, TransformerLayer: FewRowsLayer}
    for part in model.modules():
        part.__class__ = own.get(type(part), type(part))


class FewRowsLayer(TransformerLayer):
    """`TransformerLayer`: a step of few rows is one call, a tenth of the operators' and Python's time; else as it is.

    It takes joint `Attention` with or without rotation, either feed-forward network, `nn.LayerNorm` or `RMSNorm`, in
    float32 or bfloat16, rounded or not. In bfloat16 the layer computes in float32 and rounds what it adds up once. On
    an NVIDIA GPU with Triton it takes layers that are not quantized, in float16, too (`ftk.modules.few_rows_triton`).
    """

    _plan: _Plan | None = None

    def forward(self, hidden: Tensor, attend: Attend) -> Tensor:
        """hidden [B, T, H] -> [B, T, H]"""
        step = _step_of(self, hidden, attend)
        if step is None:
            return super().forward(hidden, attend)
        parts = _parts_of(self)
        addresses = tuple(_addresses(parts))
        if self._plan is None or self._plan.parts != parts or self._plan.addresses != addresses:
            self._plan = _Plan(parts, addresses, _kernel_of(self, parts, hidden.device))
        kernel = self._plan.kernel
        if kernel is None or not _is_worth_it(kernel, hidden.numel() // hidden.size(-1)):
            return super().forward(hidden, attend)
        if any(part._forward_hooks or part._forward_pre_hooks for part in parts):
            return super().forward(hidden, attend)
        return step.run(kernel, hidden)


class _Plan(NamedTuple):
    """The kernel of a layer, and what it was made of."""

    parts: tuple[nn.Module, ...]
    addresses: tuple[object, ...]
    kernel: _Kernel | None  # None: another kind of layer


class _Step(NamedTuple):
    """The attention and the rotation of a call of the layer."""

    attend: StepAttend
    rotation: RotaryAttention | None

    def run(self, kernel: _Kernel, hidden: Tensor) -> Tensor:
        """hidden [R, W, H] -> [R, W, H]"""
        if not isinstance(kernel, tuple):
            return kernel.run(hidden, self.attend, self.rotation)
        layer, products = kernel
        num_rows, width, _ = hidden.shape
        result = hidden.float() if hidden.dtype != torch.float32 else hidden.clone()
        keys, values = self.attend.cache.read(num_rows, self.attend.length)
        mask, rotation = self.attend.mask, self.rotation
        layer.run(
            result.data_ptr(),
            num_rows,
            width,
            KINDS[keys.dtype],
            keys.data_ptr(),
            values.data_ptr(),
            self.attend.cache.capacity,
            self.attend.length,
            self.attend.places.data_ptr(),
            0 if mask is None else mask.data_ptr(),
            0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(2),
            0 if rotation is None else rotation.cos.data_ptr(),
            0 if rotation is None else rotation.sin.data_ptr(),
            0 if rotation is None else rotation.cos.size(-1),
            rotation is not None and rotation.interleaved,
            num_threads(num_rows * width * products),
        )
        return result if hidden.dtype == torch.float32 else result.to(hidden.dtype)


def _step_of(layer: TransformerLayer, hidden: Tensor, attend: Attend) -> _Step | None:
    """The step that this call is; None where it is none, or not one for the kernel."""
    device = hidden.device
    if layer.training or device.type not in ("cpu", "cuda"):
        return None
    if not may_be_read_by_address(hidden, device=device.type):  # first: reading sizes would add guards to an export
        return None
    inner: Any = layer.attention.layer_attend(attend) if isinstance(layer.attention, Attention) else attend
    rotation = inner if type(inner) is RotaryAttention else None
    inner = inner if rotation is None else rotation.attend
    places = getattr(inner, "places", None)  # what reads a frame has places of another kind, or none
    if not isinstance(places, Tensor) or places.device != device or inner.front is not None:
        return None
    if not 0 < hidden.numel() <= _max_rows(device, hidden.dtype) * hidden.size(-1) or not hidden.is_contiguous():
        return None
    num_rows, width, _ = hidden.shape
    if rotation is not None:
        plain = rotation.cos.shape[:-1] == (num_rows, 1, width) and rotation.cos.dtype == torch.float32
        if not plain or not (rotation.cos.is_contiguous() and rotation.sin.is_contiguous()):
            return None
    dtype = inner.cache.dtype
    if not _max_rows(device, dtype):
        return None
    mask = inner.mask
    if mask is not None and (mask.dtype != dtype or mask.shape != (num_rows, 1, width, inner.length)):
        return None
    return None if mask is not None and mask.stride(3) != 1 else _Step(inner, rotation)


def _is_worth_it(kernel: _Kernel, num_rows: int) -> bool:
    """Whether the call takes less time than the operators: on a GPU always."""
    return not isinstance(kernel, tuple) or num_rows <= _CPU_ROWS or num_rows * kernel[1] <= _MAX_PRODUCTS


def _max_rows(device: torch.device, dtype: torch.dtype) -> int:
    """The most rows of a type that a kernel takes; 0 where there is none."""
    if _takes_triton(device):
        from ftk.modules.few_rows_triton import MAX_ROWS, MAX_TOKENS

        return MAX_TOKENS if dtype in MAX_ROWS else 0
    return _MORE_CPU_ROWS if device.type == "cpu" and dtype in (torch.float32, torch.bfloat16) and max_few_rows() else 0


def _takes_triton(device: torch.device) -> bool:
    """Whether the kernels are those of Triton, which is imported only where it is needed."""
    if device.type != "cuda" or not HAS_TRITON:
        return False
    from ftk.modules.few_rows_triton import can_run

    return can_run(device)


def _parts_of(layer: TransformerLayer) -> tuple[nn.Module, ...]:
    """The modules of a layer, from their dictionaries: asked in each step, `nn.Module` looks attributes up slowly."""
    own: dict[str, Any] = layer._modules
    attention, network = own["attention"], own["feed_forward"]
    parts = (own["attention_norm"], own["feed_forward_norm"], attention, network, own["dropout"])
    return (*parts, *attention._modules.values(), *network._modules.values())


def _addresses(parts: tuple[nn.Module, ...]) -> Iterator[object]:
    """Of all parameters: they change where a model is moved or cast, and new values are loaded in place; and what
    stands between two layers of the feed-forward network."""
    yield parts[3].__dict__.get("activation")
    for part in parts:
        for tensors in (part._parameters, part._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    yield tensor.data_ptr()
                    yield tensor.dtype


def _kernel_of(layer: TransformerLayer, parts: tuple[nn.Module, ...], device: torch.device) -> _Kernel | None:
    """The kernel of a layer; None if it is of another kind."""
    attention: Any = layer.attention
    network: Any = layer.feed_forward
    if type(attention) is not Attention or hasattr(attention, "query_norm") or attention.scale is not None:
        return None
    if type(network) not in (FeedForward, GatedFeedForward):
        return None
    tensors = [tensor for part in parts for tensor in (*part.parameters(False), *part.buffers(False))]
    if not may_be_read_by_address(*tensors, device=device.type) or not all(
        tensor.is_contiguous() for tensor in tensors
    ):
        return None
    activation = _name_of(network.activation)
    norms = [layer.attention_norm, layer.feed_forward_norm]
    linears = [attention.qkv, attention.output, getattr(network, "gate", None), network.inner, network.output]
    num_key_heads, head_size = attention.key_shape
    shape = (num_key_heads, attention.group_size, head_size)
    if _takes_triton(device):
        from ftk.modules.few_rows_triton import kernels_of

        return kernels_of(norms, linears, activation, shape)
    if activation not in _ACTIVATIONS:
        return None
    own_norms = [_norm_of(norm) for norm in norms]
    matrices = [None if linear is None else _matrix_of(linear) for linear in linears]
    if None in own_norms or any(
        matrix is None and linear is not None for matrix, linear in zip(matrices, linears, strict=True)
    ):
        return None
    kernel = _few_rows.Layer(*own_norms, *matrices, _ACTIVATIONS.index(activation), *shape)  # type: ignore[arg-type, call-arg]
    return kernel, sum(linear.in_features * linear.out_features for linear in linears if linear is not None)


def _name_of(activation: Callable[[Tensor], Tensor]) -> str | None:
    """In `ACTIVATIONS`; a copied model has a copy of a function with arguments."""
    for name, known in ACTIVATIONS.items():
        if activation is known:
            return name
        both = isinstance(activation, partial) and isinstance(known, partial)
        if both and (activation.func, activation.keywords) == (known.func, known.keywords):  # type: ignore[attr-defined]
            return name
    return None


def _norm_of(norm: Any) -> tuple[int, int, int, bool, float] | None:
    if type(norm) not in (nn.LayerNorm, RMSNorm) or norm.weight is None or norm.weight.dtype not in list(KINDS)[:2]:
        return None
    bias = getattr(norm, "bias", None)
    if norm.eps is None or (bias is not None and bias.dtype != norm.weight.dtype):
        return None
    address = 0 if bias is None else bias.data_ptr()
    return KINDS[norm.weight.dtype], norm.weight.data_ptr(), address, type(norm) is RMSNorm, norm.eps


def _matrix_of(linear: Any) -> _few_rows.Matrix | None:
    if type(linear) is FewRowsLinear and linear.weight.dtype in list(KINDS)[:2]:
        return matrix_of(linear.weight, linear.bias, None, linear.in_features)
    if type(linear) is Int8Linear:
        return matrix_of(linear.quantized_weight, linear.bias, linear.weight_scale, linear.in_features)
    if type(linear) is Int4Linear:
        return matrix_of(linear.quantized_weight, linear.bias, linear.scale_and_offset, linear.in_features)
    return None
