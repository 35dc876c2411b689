"""A step of a pre-norm layer on an NVIDIA GPU in five kernels of Triton, nearly at the rate of its memory.

In a step of few rows a kernel has little to do but to read its matrix, which takes no longer than to start the kernel
and to wait for the first byte. So a layer is five kernels instead of some fourteen: the product for queries, keys and
values, with the norm in front of it; attention, with the rotation, which writes the new keys and values to the cache;
the output product, with the addition to the residual path; and the two products of the feed-forward network, with its
norm, its activation and the addition.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
from torch import Tensor, nn

from ftk.modules import few_rows_kernels as kernels
from ftk.modules.feed_forward import ACTIVATIONS
from ftk.modules.few_rows import FewRowsLinear
from ftk.modules.norms import RMSNorm

if TYPE_CHECKING:
    from ftk.modules.kv_cache import StepAttend
    from ftk.modules.rotary import RotaryAttention

logger = logging.getLogger(__name__)

MAX_ROWS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 4}
"""The most rows (tokens) of a type whose products are those of these kernels. Tensor cores multiply 16; in float32 each
row reads the matrix anew, though from a cache, as they would round the numbers."""

MAX_TOKENS = 256
"""The most tokens of a step whose attention is that of these kernels; their products may be torch's."""

ROWS_ALONE = 2
"""The most rows that are multiplied one by one in bfloat16 and float16."""

SPLITS = 4
"""Programs that share the slots of a query head where rows are so few, as one processor reads slowly; the output
product puts together what they find."""

MAX_INPUTS = 16384
"""Inputs of a product; the kernel of one row has all of them in registers."""

MAX_HEAD_SIZE = 128


def kernels_of(
    norms: Sequence[Any], linears: Sequence[Any], activation: str | None, shape: tuple[int, int, int]
) -> LayerKernels | None:
    """The kernels of a layer; None if they do not take it.

    Args:
        norms: in front of attention, and of the feed-forward network.
        linears: query-key-value and output projection; gate, which may be None, inner and output layer of the network.
        activation: its name in `ACTIVATIONS`; None: another one.
        shape: K, A/K, D.
    """
    if activation is None or shape[-1] > MAX_HEAD_SIZE:
        return None
    if any(type(norm) not in (nn.LayerNorm, RMSNorm) or norm.weight is None or norm.eps is None for norm in norms):
        return None
    some = [linear for linear in linears if linear is not None]
    if any(type(linear) is not FewRowsLinear or linear.in_features > MAX_INPUTS for linear in some):
        return None
    if len({tensor.dtype for part in (*norms, *some) for tensor in part.parameters()}) > 1:
        return None
    return LayerKernels(norms, linears, activation, shape)


class LayerKernels:
    """A step of one layer.

    Sums are in float32, and only what a kernel writes is rounded. A row's values do not depend on the other rows, but
    for the rounding on how many there are: up to two are summed up in another order than more.

    Args:
        norms, linears, activation, shape: see `kernels_of`.
    """

    def __init__(
        self, norms: Sequence[Any], linears: Sequence[Any], activation: str, shape: tuple[int, int, int]
    ) -> None:
        qkv, output, gate, inner, last = linears
        overlaps = _overlap(qkv.weight.device)
        self.qkv = _Product(qkv, overlaps, norms[0])
        self.output = _Product(output, overlaps)
        self.inner = _Product(inner, overlaps, norms[1], gate, activation)
        self.last = _Product(last, overlaps)
        self.shape, self.overlaps = shape, overlaps

    def run(self, hidden: Tensor, attend: StepAttend, rotation: RotaryAttention | None) -> Tensor:
        """hidden [R, W, H] -> [R, W, H]; see `FewRowsLayer`"""
        with torch.cuda.device_of(hidden):  # Triton launches on the present one
            attended, logs = self._attend(self.qkv(hidden), attend, rotation)
            hidden = self.output(attended, hidden, logs)
            return self.last(self.inner(hidden), hidden)

    def _attend(
        self, joint: Tensor, attend: StepAttend, rotation: RotaryAttention | None
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of tokens [R, W, K (A/K + 2) D], whose keys and values are written to the cache.

        Returns:
            [R, W, A D] and None; or results of splits [SPLITS, R, W, A D] and logs [SPLITS, R, W, A], see `attended`
        """
        num_key_heads, group, size = self.shape
        num_rows, width, _ = joint.shape
        num_heads, num_tokens = num_key_heads * group, num_rows * width
        keys, values = attend.cache.read(num_rows, attend.length)
        mask, block_d = attend.mask, triton.next_power_of_2(size)
        splits, logs = 1, None
        result = joint.new_empty(num_rows, width, num_heads * size)
        if num_tokens <= ROWS_ALONE:
            splits = SPLITS
            result = joint.new_empty(splits, *result.shape, dtype=torch.float32)
            logs = result.new_empty(splits, num_rows, width, num_heads)
        kernels.attended[num_heads, num_tokens, splits](
            joint,
            keys,
            values,
            attend.places,
            mask,
            None if rotation is None else rotation.cos,
            None if rotation is None else rotation.sin,
            result,
            logs,
            0 if mask is None else mask.stride(0),
            0 if mask is None else mask.stride(2),
            attend.length,
            attend.cache.capacity,
            HEADS=num_key_heads,
            GROUP=group,
            SIZE=size,
            WIDTH=width,
            TURNS=0 if rotation is None else rotation.cos.size(-1),
            IS_INTERLEAVED=rotation is not None and rotation.interleaved,
            BLOCK_D=block_d,
            BLOCK_W=triton.next_power_of_2(width),
            BLOCK_S=min(128, 16384 // (block_d * joint.element_size())),  # of keys and values each four blocks at most
            num_warps=8,
            **_how(self.overlaps),
        )
        return result, logs


class _Product(NamedTuple):
    """One kernel: a norm, a linear layer with its activation, which may be a gate's, and an addition.

    Attributes:
        linear: with a weight [O, I].
        overlaps: whether the kernel begins before the one in front of it ends.
        norm: None: none.
        gate: a linear layer; what it gives is activated, and multiplied by what `linear` gives.
        activation: of what `linear` gives where there is no gate; "" for none.
    """

    linear: Any
    overlaps: bool
    norm: Any = None
    gate: Any = None
    activation: str = ""

    def __call__(self, hidden: Tensor, residual: Tensor | None = None, logs: Tensor | None = None) -> Tensor:
        """hidden [..., I] -> [..., O], with the residual [..., O] added; or what `_attend` returns for hidden"""
        weight, gate, norm = self.linear.weight, self.gate, self.norm
        outputs, inputs = weight.shape
        if logs is None and hidden.numel() > MAX_ROWS[weight.dtype] * inputs:
            return self._by_torch(hidden, residual)
        result = weight.new_empty(*hidden.shape[0 if logs is None else 1 : -1], outputs)
        num_rows = result.numel() // outputs
        given = (
            hidden,
            None if norm is None else norm.weight,
            None if norm is None else getattr(norm, "bias", None),
            0.0 if norm is None else norm.eps,
            None if gate is None else gate.weight,
            None if gate is None else gate.bias,
            weight,
            self.linear.bias,
            residual,
            result,
        )
        fixed = {"INPUTS": inputs, "OUTPUTS": outputs, "ACTIVATION": self.activation, **_how(self.overlaps)}
        fixed["IS_CENTRED"] = isinstance(norm, nn.LayerNorm)
        matrices = 1 if gate is None else 2
        if num_rows <= ROWS_ALONE or weight.dtype == torch.float32:
            block_i, block_o, warps = _tile_of_one(inputs, outputs, matrices * weight.element_size())
            heads = {"logs": logs, "SPLITS": SPLITS, "HEADS": 1 if logs is None else logs.size(-1)}
            kernels.one_row[num_rows, triton.cdiv(outputs, block_o)](
                *given, **heads, **fixed, BLOCK_I=block_i, BLOCK_O=block_o, num_warps=warps
            )
        else:
            rows = 8 if num_rows <= 8 else 16
            block_i, block_o, warps = _tile_of_some(inputs, outputs, matrices, rows)
            fixed |= {"PARTS": warps, "ROWS": rows, "num_stages": 3 if norm is None else 2}
            kernels.some_rows[triton.cdiv(outputs, block_o),](
                *given, num_rows, **fixed, BLOCK_I=block_i, BLOCK_O=block_o, num_warps=warps
            )
        return result

    def _by_torch(self, hidden: Tensor, residual: Tensor | None) -> Tensor:
        hidden = hidden if self.norm is None else self.norm(hidden)
        values: Tensor = self.linear(hidden)
        if self.gate is not None:
            values = values * ACTIVATIONS[self.activation](self.gate(hidden))
        elif self.activation:
            values = ACTIVATIONS[self.activation](values)
        return values if residual is None else values + residual


def _tile_of_one(inputs: int, outputs: int, num_bytes: int) -> tuple[int, int, int]:
    """Inputs and outputs of a program of `one_row`, and its warps, which take 32 KB at most.

    There are two programs at least for each of some 130 processors.
    """
    block_i, block_o = triton.next_power_of_2(inputs), 8
    while block_o > 1 and (block_i * block_o * num_bytes > 32768 or outputs < 256 * block_o):
        block_o //= 2
    return block_i, block_o, 4 if block_i * block_o * num_bytes <= 16384 else 8


def _tile_of_some(inputs: int, outputs: int, matrices: int, rows: int) -> tuple[int, int, int]:
    """The same of `some_rows`: blocks of inputs follow one another, 32 KB of the rows in each."""
    block_i = min(16384 // (rows * matrices), max(128, triton.next_power_of_2(inputs)))
    return block_i, 16 if outputs >= 2048 and block_i * matrices <= 1024 else 8, 8


def _how(overlaps: bool) -> dict[str, bool]:
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@cache
def _overlap(device: torch.device) -> bool:
    """Whether a kernel can begin before the one in front of it ends."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def can_run(device: torch.device) -> bool:
    """Whether an NVIDIA GPU multiplies bfloat16, and Triton works there: tried once, as it needs a C compiler."""
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        with torch.cuda.device(device):
            zeros = torch.zeros(16, 16, device=device, dtype=torch.bfloat16)
            _Product(SimpleNamespace(weight=zeros, bias=None), _overlap(device))(zeros[:1])
    except Exception as error:
        logger.warning("Triton cannot be used, torch computes the steps: %s", str(error).partition("\n")[0])
        return False
    return True
