"""Linear layers and the tied embedding with int8 or int4 weights: plain tensors, on packed kernels.

Weights alone are rounded; activations stay floating point. On x86-64 CPUs our own kernel (`ftk.modules.few_rows`) takes
float32 and rounds nothing else. PyTorch's packed kernels, elsewhere, take bfloat16 activations (in float32 they are
slower than no quantisation at all), so each layer rounds what it reads, and the residual path keeps its type.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ftk.errors import UserError
from ftk.modules.few_rows import few_rows_linear, linear, max_few_rows, may_be_read_by_address
from ftk.modules.initialization import Constant, declare
from ftk.modules.precision import matmul_dtype

GROUP_SIZES = (32, 64, 128, 256)
"""Inputs that share a scale in int4; what the packed kernels take."""

PACKED_MAX_ROWS = 16
"""Up to this many rows (tokens) the packed kernel is at least twice as fast as making the weights bfloat16 for one
matrix product."""

_OWN_TYPES = (torch.float32, torch.bfloat16)

_ROWS_AT_ONCE = 4096  # of a weight while it is rounded: bounds the memory of the search
_SHRINKS = tuple(1.0 - 0.02 * step for step in range(21))


class Rounded(nn.Module):
    """Has rounded weights; its scales stay in bfloat16, the type of the packed kernels, whatever it is cast to."""

    scales: str  # name of the buffer
    quantized_weight: Tensor
    bias: Tensor | None

    @property
    def num_parameters(self) -> int:
        """Of what was rounded; a byte of uint8 holds two."""
        weights = self.quantized_weight.numel() * (2 if self.quantized_weight.dtype == torch.uint8 else 1)
        bias = getattr(self, "bias", None)
        return weights + (0 if bias is None else bias.numel())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rounded:
        kept = self.get_buffer(self.scales)
        super()._apply(fn, recurse)
        moved = self.get_buffer(self.scales)
        if moved.dtype != torch.bfloat16:  # the old values: what another type has rounded away is gone
            setattr(self, self.scales, kept.to(moved.device))
        return self


class Int8Linear(Rounded):
    """A linear layer with int8 weights and one scale per output row.

    Buffers: quantized_weight int8 [O, I], weight_scale bfloat16 [O], bias [O] or None;
    weight = quantized_weight * weight_scale.

    Args:
        in_features: I.
        out_features: O.
        bias: whether there is one.
        dtype: of the bias.
    """

    scales = "weight_scale"

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.register_buffer("quantized_weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(out_features, dtype=torch.bfloat16))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)
        declare(self, quantized_weight=Constant(0.0), weight_scale=Constant(1.0))
        self.weight_scale: Tensor

    @classmethod
    def of(cls, linear: nn.Linear) -> Int8Linear:
        """The layer with the weights of `linear`, rounded."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, linear.weight.dtype)
        layer.quantized_weight, layer.weight_scale = int8_rounded(linear.weight.detach())
        layer.bias = _copied(linear.bias)
        return layer

    @property
    def weight(self) -> Tensor:
        """float32 [O, I]: what the rounded weights stand for; computed at each access."""
        return self.quantized_weight.float() * self.weight_scale.float()[:, None]

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O], in the type of `hidden`"""
        return int8_linear(hidden, self.quantized_weight, self.weight_scale, self.bias)


class Int4Linear(Rounded):
    """A linear layer with int4 weights, scale and offset for each group of inputs of an output row.

    Buffers: quantized_weight uint8 [O, I / 2], two values per byte, the even input in the high half; scale_and_offset
    bfloat16 [I / G, O, 2]; bias [O] or None. weight = (value - 8) * scale + offset. The packed kernels want another
    order of the bytes, which depends on the processor: it is made at the first use and cached.

    Args:
        in_features: I; a multiple of G.
        out_features: O.
        bias: whether there is one.
        group_size: G, one of `GROUP_SIZES`.
        dtype: of the bias.

    Raises:
        UserError: G does not divide I.
    """

    scales = "scale_and_offset"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group_size: int = 32,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if in_features % group_size:
            raise UserError(
                f"int4 weights in groups of {group_size} inputs, but a layer has {in_features} inputs; "
                "choose a group size that divides them, or int8"
            )
        self.group_size = group_size
        self.in_features, self.out_features = in_features, out_features
        scales = torch.zeros(in_features // group_size, out_features, 2, dtype=torch.bfloat16)
        self.register_buffer("quantized_weight", torch.zeros(out_features, in_features // 2, dtype=torch.uint8))
        self.register_buffer("scale_and_offset", scales)
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)
        declare(self, quantized_weight=Constant(0.0), scale_and_offset=Constant(0.0))
        self.scale_and_offset: Tensor
        self._packed: tuple[tuple[int, int, torch.device], Tensor] | None = None

    @classmethod
    def of(cls, linear: nn.Linear, group_size: int) -> Int4Linear:
        """The layer with the weights of `linear`, rounded."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, group_size, linear.weight.dtype)
        layer.quantized_weight, layer.scale_and_offset = int4_rounded(linear.weight.detach(), group_size)
        layer.bias = _copied(linear.bias)
        return layer

    @property
    def weight(self) -> Tensor:
        """float32 [O, I]: what the rounded weights stand for; computed at each access."""
        return self._dequantized(torch.float32)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden [..., I] -> [..., O], in the type of `hidden`"""
        if _own_kernel_fits(hidden, self.quantized_weight, self.scale_and_offset, self.bias):
            return few_rows_linear(hidden, self.quantized_weight, self.bias, self.scale_and_offset)
        if _makes_gradients():
            return _with_bias(_Product.apply(hidden, self._dequantized), self.bias)
        if _packed_kernel_fits(hidden) and self._kernel_exists(hidden.device):
            packed_mm = torch._weight_int4pack_mm_for_cpu if hidden.device.type == "cpu" else torch._weight_int4pack_mm
            rows = hidden.reshape(-1, hidden.size(-1)).to(torch.bfloat16)
            product = packed_mm(rows, self._packed_weight(), self.group_size, self.scale_and_offset)
            return _with_bias(product.to(hidden.dtype).view(*hidden.shape[:-1], -1), self.bias)
        dtype = _matmul_dtype(hidden)
        return _with_bias(linear(hidden.to(dtype), self._dequantized(dtype)).to(hidden.dtype), self.bias)

    def _dequantized(self, dtype: torch.dtype) -> Tensor:
        values = unpacked_int4(self.quantized_weight).float().unflatten(1, (-1, self.group_size)) - 8.0  # [O, I/G, G]
        scale, offset = self.scale_and_offset.float().transpose(0, 1).unsqueeze(2).unbind(-1)  # each [O, I/G, 1]
        return (values * scale + offset).flatten(1).to(dtype)

    def _kernel_exists(self, device: torch.device) -> bool:
        num_outputs, num_inputs = self.quantized_weight.size(0), 2 * self.quantized_weight.size(1)
        if device.type == "cpu":
            return num_outputs % 16 == 0 and has_packed_kernel("int4", device.type)
        return num_outputs % 8 == 0 and num_inputs % 128 == 0 and has_packed_kernel("int4", device.type)

    def _packed_weight(self) -> Tensor:
        stored = self.quantized_weight
        version = 0 if stored.is_inference() else stored._version  # loading fills the buffer in place
        key = (stored.data_ptr(), version, stored.device)
        if self._packed is None or self._packed[0] != key:
            self._packed = (key, packed_int4(stored))
        return self._packed[1]


class Int8TiedEmbedding(Rounded):
    """A token embedding with int8 rows and one scale per row, whose matrix is the output layer too.

    Args:
        num_embeddings: V.
        embedding_dim: H.
        dtype: of the embedded tokens.
    """

    scales = "weight_scale"

    def __init__(self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.register_buffer("quantized_weight", torch.zeros(num_embeddings, embedding_dim, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(num_embeddings, dtype=torch.bfloat16))
        # Carries the type: module.to(dtype) changes it with the rest of the model.
        self.register_buffer("like", torch.zeros(0, dtype=dtype), persistent=False)
        declare(self, quantized_weight=Constant(0.0), weight_scale=Constant(1.0), like=Constant(0.0))
        self.weight_scale: Tensor
        self.like: Tensor

    @classmethod
    def of(cls, embedding: nn.Embedding) -> Int8TiedEmbedding:
        """The embedding with the rows of `embedding`, rounded."""
        new = cls(embedding.num_embeddings, embedding.embedding_dim, embedding.weight.dtype)
        new.quantized_weight, new.weight_scale = int8_rounded(embedding.weight.detach())
        new.like = new.like.to(embedding.weight.device)
        return new

    @property
    def weight(self) -> Tensor:
        """[V, H]: what the rounded rows stand for; computed at each access."""
        return self.quantized_weight.to(self.like.dtype) * self.weight_scale.to(self.like.dtype)[:, None]

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...] int64 -> [..., H]"""
        rows = F.embedding(tokens, self.quantized_weight).to(self.like.dtype)
        return rows * self.weight_scale[tokens].to(self.like.dtype).unsqueeze(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [..., H] -> [..., V]; there is no bias."""
        return int8_linear(hidden, self.quantized_weight, self.weight_scale)


def int8_linear(hidden: Tensor, quantized_weight: Tensor, weight_scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [..., I] times int8 [O, I] with one scale per row, bfloat16 [O], plus bias -> [..., O], in its type."""
    if _own_kernel_fits(hidden, quantized_weight, weight_scale, bias):
        return few_rows_linear(hidden, quantized_weight, bias, weight_scale)
    if _makes_gradients():
        return _with_bias(_Product.apply(hidden, partial(_int8_weight, quantized_weight, weight_scale)), bias)
    return _with_bias(_int8_product(hidden, quantized_weight, weight_scale), bias)


class _Product(torch.autograd.Function):
    """hidden [..., I] times a frozen weight [O, I] that is made when it is needed: the backward pass keeps none.

    The weight is what the rounded numbers stand for, in the type of `hidden`, or in that of autocast.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight_as: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.weight_as, ctx.dtype = weight_as, matmul_dtype(hidden)
        return F.linear(hidden.to(ctx.dtype), weight_as(ctx.dtype)).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.to(ctx.dtype) @ ctx.weight_as(ctx.dtype)).to(grad.dtype), None


def _int8_weight(quantized_weight: Tensor, weight_scale: Tensor, dtype: torch.dtype) -> Tensor:
    exact = torch.promote_types(dtype, torch.float32)
    return (quantized_weight.to(exact) * weight_scale.to(exact)[:, None]).to(dtype)


def _int8_product(hidden: Tensor, quantized_weight: Tensor, weight_scale: Tensor) -> Tensor:
    # With AVX2 and AVX-512 that kernel takes 16 inputs at once, and reads past a row that has no multiple of them.
    if _packed_kernel_fits(hidden) and hidden.size(-1) % 16 == 0 and has_packed_kernel("int8", hidden.device.type):
        rows = hidden.reshape(-1, hidden.size(-1)).to(torch.bfloat16)
        product = torch._weight_int8pack_mm(rows, quantized_weight, weight_scale)
        return product.to(hidden.dtype).view(*hidden.shape[:-1], -1)
    dtype = _matmul_dtype(hidden)
    product = linear(hidden.to(dtype), quantized_weight.to(dtype))  # every int8 is exact in bfloat16
    exact = torch.promote_types(dtype, torch.float32)  # unscaled sums are beyond what float16 holds
    return (product.to(exact) * weight_scale.to(exact)).to(hidden.dtype)


def int8_rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [O, I] -> int8 [O, I] and its scales, bfloat16 [O], rounded before the weights are."""
    scale = (weight.float().abs().amax(1) / 127.0).to(torch.bfloat16)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a row of zeros
    return (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def int4_rounded(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    """The int4 weights with the least squared error over a search of ranges, group by group.

    Args:
        weight: [O, I].
        group_size: G; divides I.

    Returns:
        packed uint8 [O, I / 2], and scale and offset, bfloat16 [I / G, O, 2]; see `Int4Linear`.
    """
    parts = [_int4_rows(rows, group_size) for rows in weight.split(_ROWS_AT_ONCE)]
    return torch.cat([packed for packed, _ in parts]), torch.cat([scales for _, scales in parts], dim=1)


def _int4_rows(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
    groups = weight.float().unflatten(1, (-1, group_size))  # [O, I/G, G]
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)  # [O, I/G, 1]
    best = torch.full_like(low, float("inf"))
    best_scale, best_offset = torch.ones_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = ((high - low) * (shrink / 15.0)).to(torch.bfloat16).float()
        # Value 8 lies half a step above the middle, so that 0 and 15 lie evenly around it.
        offset = ((high + low + scale) / 2.0).to(torch.bfloat16).float()
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a group of one value: all are 8
        values = ((groups - offset) / scale).round().clamp(-8, 7)
        error = (values * scale + offset - groups).square().sum(2, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        best_scale, best_offset = torch.where(better, scale, best_scale), torch.where(better, offset, best_offset)
    values = ((groups - best_offset) / best_scale).round().clamp(-8, 7) + 8.0
    flat = values.flatten(1).to(torch.uint8)  # [O, I]
    scales = torch.cat((best_scale, best_offset), dim=2).transpose(0, 1).to(torch.bfloat16).contiguous()
    return flat[:, ::2] * 16 + flat[:, 1::2], scales


def unpacked_int4(packed: Tensor) -> Tensor:
    """uint8 [O, I / 2] -> uint8 [O, I] with values 0 to 15."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)


def packed_int4(packed: Tensor) -> Tensor:
    """Our bytes in the order of the packed kernel of their device."""
    if packed.device.type == "cpu":
        return torch._convert_weight_to_int4pack_for_cpu(unpacked_int4(packed).to(torch.int32), 1)
    return torch._convert_weight_to_int4pack(packed, 8)


@cache
def has_packed_kernel(kind: str, device: str) -> bool:
    """Whether PyTorch's kernel for "int8" or "int4" weights is there and right on this device; tried once.

    They are private functions of PyTorch: what is missing, or takes or returns something else, is not used.
    """
    probes: dict[str, Callable[[torch.device], tuple[Tensor, Tensor]]] = {"int8": _probe_int8, "int4": _probe_int4}
    try:
        # On its own values, and never inside inference mode's or autocast's rules of the caller.
        with torch.inference_mode(False), torch.no_grad():
            found, wanted = probes[kind](torch.device(device))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return False
    return found.shape == wanted.shape and torch.allclose(found.float(), wanted, rtol=0.02, atol=0.02 * 128**0.5)


def _probe_values(device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 128, generator=generator)
    return weight.to(device), torch.randn(1, 128, generator=generator).to(device, torch.bfloat16)


def _probe_int8(device: torch.device) -> tuple[Tensor, Tensor]:
    weight, hidden = _probe_values(device)
    values, scale = int8_rounded(weight)
    return torch._weight_int8pack_mm(hidden, values, scale), hidden.float() @ (
        values.float() * scale[:, None].float()
    ).T


def _probe_int4(device: torch.device) -> tuple[Tensor, Tensor]:
    weight, hidden = _probe_values(device)
    layer = Int4Linear(128, 64, bias=False)
    layer.quantized_weight, layer.scale_and_offset = int4_rounded(weight, 32)
    packed_mm = torch._weight_int4pack_mm_for_cpu if device.type == "cpu" else torch._weight_int4pack_mm
    found = packed_mm(hidden, packed_int4(layer.quantized_weight), 32, layer.scale_and_offset)
    return found, hidden.float() @ layer.weight.T


def _own_kernel_fits(hidden: Tensor, quantized_weight: Tensor, scales: Tensor, bias: Tensor | None) -> bool:
    return (
        may_be_read_by_address(hidden, quantized_weight, scales, bias)  # first, as in `linear`
        and hidden.dtype in _OWN_TYPES
        and 0 < hidden.numel() <= min(max_few_rows(), 1) * PACKED_MAX_ROWS * hidden.size(-1)
        and (bias is None or bias.dtype in _OWN_TYPES)
    )


def _makes_gradients() -> bool:
    """Whether this is training: also a first layer, whose input has no gradient, is to be exact there."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _packed_kernel_fits(hidden: Tensor) -> bool:
    """An exported program uses public operators alone."""
    if torch.compiler.is_compiling():
        return False
    return 0 < hidden.numel() <= PACKED_MAX_ROWS * hidden.size(-1)


def _matmul_dtype(hidden: Tensor) -> torch.dtype:
    """bfloat16, as in the packed kernels, where the device multiplies it fast; else the input's own type."""
    if torch.compiler.is_compiling() or hidden.dtype == torch.float64:
        return hidden.dtype
    if _has_fast_bfloat16(hidden.device.type):
        return torch.bfloat16
    return torch.float32 if hidden.dtype == torch.float16 else hidden.dtype


@cache
def _has_fast_bfloat16(device: str) -> bool:
    if device == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


def _copied(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().clone()
