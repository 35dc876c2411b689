"""A step of a pre-norm layer on an NVIDIA GPU in five kernels of Triton, nearly at the rate of its memory.

In a step of few rows a kernel has little to do but to read its matrix, which takes no longer than to start the kernel
and to wait for the first byte. So a layer is five kernels instead of some fourteen: the product for queries, keys and
values, with the norm in front of it; attention, with the rotation, which writes the new keys and values to the cache;
the output product, with the addition to the residual path; and the two products of the feed-forward network, with its
norm, its activation and the addition.

On Hopper and newer a kernel begins while the one before it ends (programmatic dependent launch): it loads what kernels
of torch have written, such as its weights and the mask, and only then waits for what the other gives.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ftk.modules.feed_forward import ACTIVATIONS
from ftk.modules.few_rows import FewRowsLinear
from ftk.modules.norms import RMSNorm

if TYPE_CHECKING:
    from ftk.modules.few_rows_layer import StepAttend
    from ftk.modules.rotary import RotaryAttention

logger = logging.getLogger(__name__)

MOST_ROWS = {torch.bfloat16: 16, torch.float16: 16, torch.float32: 4}
"""The most rows (tokens) of a type whose products are those of these kernels. Tensor cores multiply 16; in float32 each
row reads the matrix anew, though from a cache, as they would round the numbers."""

MOST_TOKENS = 256
"""The most tokens of a step whose attention is that of these kernels; their products may be torch's."""

ROWS_ALONE = 2
"""The most rows that are multiplied one by one in bfloat16 and float16."""

SPLITS = 4
"""Programs that share the slots of a query head where rows are so few, as one processor reads slowly; the output
product puts together what they find."""

MOST_INPUTS = 16384
"""Of a product; the kernel of one row has all of them in registers."""

MOST_DIMENSIONS = 128
"""Of a head."""


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
    if activation is None or shape[-1] > MOST_DIMENSIONS:
        return None
    if any(type(norm) not in (nn.LayerNorm, RMSNorm) or norm.weight is None or norm.eps is None for norm in norms):
        return None
    some = [linear for linear in linears if linear is not None]
    if any(type(linear) is not FewRowsLinear or linear.in_features > MOST_INPUTS for linear in some):
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
            [R, W, A D] and None; or results of splits [SPLITS, R, W, A D] and logs [SPLITS, R, W, A], see `_attended`
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
        _attended[num_heads, num_tokens, splits](
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
        if logs is None and hidden.numel() > MOST_ROWS[weight.dtype] * inputs:
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
            _one_row[num_rows, triton.cdiv(outputs, block_o)](
                *given, **heads, **fixed, BLOCK_I=block_i, BLOCK_O=block_o, num_warps=warps
            )
        else:
            rows = 8 if num_rows <= 8 else 16
            block_i, block_o, warps = _tile_of_some(inputs, outputs, matrices, rows)
            fixed |= {"PARTS": warps, "ROWS": rows, "num_stages": 3 if norm is None else 2}
            _some_rows[triton.cdiv(outputs, block_o),](
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
    """Inputs and outputs of a program of `_one_row`, and its warps, which take 32 KB at most.

    There are two programs at least for each of some 130 processors.
    """
    block_i, block_o = triton.next_power_of_2(inputs), 8
    while block_o > 1 and (block_i * block_o * num_bytes > 32768 or outputs < 256 * block_o):
        block_o //= 2
    return block_i, block_o, 4 if block_i * block_o * num_bytes <= 16384 else 8


def _tile_of_some(inputs: int, outputs: int, matrices: int, rows: int) -> tuple[int, int, int]:
    """The same of `_some_rows`: blocks of inputs follow one another, 32 KB of the rows in each."""
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
        logger.warning("no kernels of Triton, so steps take those of torch: %s", str(error).partition("\n")[0])
        return False
    return True


@triton.jit
def _activated(values, ACTIVATION: tl.constexpr):
    """By its name in `ACTIVATIONS`. What is not a number stays so."""
    if ACTIVATION == "gelu_tanh":  # 1 + tanh(x) = 2 sigmoid(2 x)
        values *= tl.sigmoid(1.5957691216057308 * (values + 0.044715 * values * values * values))
    elif ACTIVATION == "gelu":
        values *= 0.5 + 0.5 * tl.erf(0.7071067811865476 * values)
    elif ACTIVATION == "relu":
        values = tl.where(values < 0.0, 0.0, values)
    elif ACTIVATION == "silu":
        values *= tl.sigmoid(values)
    return values


@triton.jit
def _one_row(
    hidden,  # [M, I], or [SPLITS, M, I] with logs
    norm_weight,  # [I]; None: no norm
    norm_bias,  # [I] or None
    eps,
    gate,  # [O, I] or None
    gate_bias,  # [O] or None
    weight,  # [O, I]
    bias,  # [O] or None
    residual,  # [M, O] or None
    result,  # [M, O]
    logs,  # [SPLITS, M, HEADS] or None, see `_attended`
    SPLITS: tl.constexpr,
    HEADS: tl.constexpr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """Some outputs of one row: all that is read of the matrix is on its way at once."""
    if OVERLAPS:
        gdc_launch_dependents()
    row = tl.program_id(0)
    outputs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    inputs = tl.arange(0, BLOCK_I)
    is_output, is_input = outputs < OUTPUTS, inputs < INPUTS
    places = outputs[:, None] * INPUTS + inputs[None, :]
    is_weight = is_output[:, None] & is_input[None, :]
    weights = tl.load(weight + places, is_weight, 0.0, eviction_policy="evict_first")
    if gate is not None:
        gates = tl.load(gate + places, is_weight, 0.0, eviction_policy="evict_first")
    if norm_weight is not None:
        factors = tl.load(norm_weight + inputs, is_input, 0.0)
    if norm_bias is not None:
        shifts = tl.load(norm_bias + inputs, is_input, 0.0)
    if bias is not None:
        biases = tl.load(bias + outputs, is_output, 0.0)
    if gate_bias is not None:
        gate_biases = tl.load(gate_bias + outputs, is_output, 0.0)
    if OVERLAPS:
        gdc_wait()  # from here on what other kernels write is read, and what they read is written
    if logs is None:
        values = tl.load(hidden + row * INPUTS + inputs, is_input, 0.0).to(tl.float32)
    else:
        own = row * HEADS + inputs // (INPUTS // HEADS)
        shift = tl.num_programs(0) * HEADS
        highest = tl.load(logs + own, is_input, 0.0)
        for split in tl.static_range(1, SPLITS):
            highest = tl.maximum(highest, tl.load(logs + split * shift + own, is_input, 0.0))
        values = tl.zeros([BLOCK_I], tl.float32)
        totals = tl.zeros([BLOCK_I], tl.float32)
        for split in tl.static_range(SPLITS):
            shares = tl.exp(tl.load(logs + split * shift + own, is_input, 0.0) - highest)
            totals += shares
            line = hidden + (split * tl.num_programs(0) + row) * INPUTS
            values += shares * tl.load(line + inputs, is_input, 0.0)
        values /= totals
    if residual is not None:
        before = tl.load(residual + row * OUTPUTS + outputs, is_output, 0.0)
    if norm_weight is not None:
        if IS_CENTRED:
            values = tl.where(is_input, values - tl.sum(values, 0) / INPUTS, 0.0)
        values *= tl.rsqrt(tl.sum(values * values, 0) / INPUTS + eps) * factors.to(tl.float32)
        if norm_bias is not None:
            values += shifts.to(tl.float32)
    sums = tl.sum(weights.to(tl.float32) * values[None, :], 1)
    if bias is not None:
        sums += biases.to(tl.float32)
    if gate is not None:
        gated = tl.sum(gates.to(tl.float32) * values[None, :], 1)
        if gate_bias is not None:
            gated += gate_biases.to(tl.float32)
        sums *= _activated(gated, ACTIVATION)
    else:
        sums = _activated(sums, ACTIVATION)
    if residual is not None:
        sums += before.to(tl.float32)
    tl.store(result + row * OUTPUTS + outputs, sums.to(result.dtype.element_ty), is_output)


@triton.jit(do_not_specialize=["num_rows"])
def _some_rows(
    hidden,
    norm_weight,
    norm_bias,
    eps,
    gate,
    gate_bias,
    weight,
    bias,
    residual,
    result,
    num_rows,  # M
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_CENTRED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Some outputs of all rows, as `_one_row`. Each warp has a part of each block of inputs, as one alone would add up
    the whole block step by step."""
    if OVERLAPS:
        gdc_launch_dependents()
    PART: tl.constexpr = BLOCK_I // PARTS
    outputs = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    rows = tl.arange(0, ROWS)
    is_output, is_row = outputs < OUTPUTS, rows < num_rows
    inputs = tl.arange(0, PARTS)[:, None, None] * PART + tl.arange(0, PART)[None, None, :]  # [parts, 1, part]
    places = outputs[None, :, None] * INPUTS + inputs  # [parts, O, part]
    is_weight = is_output[None, :, None] & (inputs < INPUTS)
    weights = tl.load(weight + places, is_weight, 0.0, eviction_policy="evict_first")
    if gate is not None:
        gates = tl.load(gate + places, is_weight, 0.0, eviction_policy="evict_first")
    if norm_weight is not None:
        factors = tl.load(norm_weight + inputs, inputs < INPUTS, 0.0)
    if norm_bias is not None:
        shifts = tl.load(norm_bias + inputs, inputs < INPUTS, 0.0)
    if bias is not None:
        biases = tl.load(bias + outputs, is_output, 0.0)
    if gate_bias is not None:
        gate_biases = tl.load(gate_bias + outputs, is_output, 0.0)
    if OVERLAPS:
        gdc_wait()
    there = rows[:, None] * OUTPUTS + outputs[None, :]
    is_result = is_row[:, None] & is_output[None, :]
    if residual is not None:
        before = tl.load(residual + there, is_result, 0.0)
    lines = hidden + rows[None, :, None] * INPUTS
    if norm_weight is not None:
        means = tl.zeros([ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        if IS_CENTRED:
            for start in range(0, INPUTS, BLOCK_I):
                is_value = is_row[None, :, None] & (start + inputs < INPUTS)
                values = tl.load(lines + start + inputs, is_value, 0.0).to(tl.float32)
                means += tl.sum(tl.sum(values, 2), 0) / INPUTS
        for start in range(0, INPUTS, BLOCK_I):
            is_value = is_row[None, :, None] & (start + inputs < INPUTS)
            values = tl.load(lines + start + inputs, is_value, 0.0).to(tl.float32)
            values = tl.where(is_value, values - means[None, :, None], 0.0)
            squares += tl.sum(tl.sum(values * values, 2), 0) / INPUTS
        scales = tl.rsqrt(squares + eps)
    sums = tl.zeros([PARTS, ROWS, BLOCK_O], tl.float32)
    gated = tl.zeros([PARTS, ROWS, BLOCK_O], tl.float32)
    for start in range(0, INPUTS, BLOCK_I):
        # The next block is on its way while this one is multiplied.
        ahead = start + BLOCK_I + inputs
        is_ahead = is_output[None, :, None] & (ahead < INPUTS)
        values = tl.load(lines + start + inputs, is_row[None, :, None] & (start + inputs < INPUTS), 0.0)
        next_weights = tl.load(weight + places + start + BLOCK_I, is_ahead, 0.0, eviction_policy="evict_first")
        if norm_weight is not None:
            values = (values.to(tl.float32) - means[None, :, None]) * scales[None, :, None] * factors.to(tl.float32)
            factors = tl.load(norm_weight + ahead, ahead < INPUTS, 0.0)
            if norm_bias is not None:
                values += shifts.to(tl.float32)
                shifts = tl.load(norm_bias + ahead, ahead < INPUTS, 0.0)
        values = values.to(weights.dtype)
        sums = tl.dot(values, tl.permute(weights, 0, 2, 1), sums)
        weights = next_weights
        if gate is not None:
            next_gates = tl.load(gate + places + start + BLOCK_I, is_ahead, 0.0, eviction_policy="evict_first")
            gated = tl.dot(values, tl.permute(gates, 0, 2, 1), gated)
            gates = next_gates
    found = tl.sum(sums, 0)  # [rows, O]
    if bias is not None:
        found += biases.to(tl.float32)[None, :]
    if gate is not None:
        opened = tl.sum(gated, 0)
        if gate_bias is not None:
            opened += gate_biases.to(tl.float32)[None, :]
        found *= _activated(opened, ACTIVATION)
    else:
        found = _activated(found, ACTIVATION)
    if residual is not None:
        found += before.to(tl.float32)
    tl.store(result + there, found.to(result.dtype.element_ty), is_result)


@triton.jit
def _rotated(
    heads, angles, cos, sin, dims, is_head, SIZE: tl.constexpr, TURNS: tl.constexpr, IS_INTERLEAVED: tl.constexpr
):
    """Heads at some places, [n, D]; the leading 2 TURNS dimensions turned by the angles in lines of cos and sin."""
    values = tl.load(heads + dims, is_head & (dims < SIZE), 0.0).to(tl.float32)
    if TURNS > 0:
        is_turned = is_head & (dims < 2 * TURNS)
        if IS_INTERLEAVED:
            pair, is_first, other = dims // 2, dims % 2 == 0, dims ^ 1
        else:
            is_first = dims < TURNS
            pair = tl.where(is_first, dims, dims - TURNS)
            other = tl.where(is_first, dims + TURNS, dims - TURNS)
        across = tl.load(heads + other, is_turned, 0.0).to(tl.float32)
        along = tl.load(cos + angles * TURNS + pair, is_turned, 1.0)
        aside = tl.load(sin + angles * TURNS + pair, is_turned, 0.0)
        values = values * along + tl.where(is_first, -across, across) * aside
    return values


@triton.jit(
    do_not_specialize=["mask_row", "mask_token", "length", "capacity"],
    do_not_specialize_on_alignment=["places", "mask", "cos", "sin"],
)
def _attended(
    joint,  # [R, W, K, A/K + 2, D]
    keys,  # [rows, K, capacity, D]
    values,
    places,  # [R K W]
    mask,  # [R, 1, W, S] or None
    cos,  # [R, 1, W, TURNS] or None
    sin,
    result,  # [R, W, A, D]; with logs in float32, of each split
    logs,  # [splits, R, W, A], of the sum of exp(score) in each; None: there are no splits
    mask_row,
    mask_token,
    length,  # S
    capacity,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNS: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    OVERLAPS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """One query head of one token, or one split of it: each splits-th block of slots.

    The row's new keys and values are taken from the projection, as the cache gets them in this very kernel, from the
    first head of a group. Each of the BLOCK_S places of a block has a maximum and sums of its own, put together at the
    end: the loop needs no exchange between them.
    """
    if OVERLAPS:
        gdc_launch_dependents()
    head, token, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row, key_head = token // WIDTH, head // GROUP
    line = (row * HEADS + key_head).to(tl.int64)
    news, slots = tl.arange(0, BLOCK_W), split * BLOCK_S + tl.arange(0, BLOCK_S)
    ahead = tl.num_programs(2) * BLOCK_S
    is_new, tokens = news < WIDTH, row * WIDTH + news
    new_places = tl.load(places + line * WIDTH + news, is_new, -1)
    new_slots = new_places - line * capacity
    if mask is not None:
        mask += row * mask_row + (token % WIDTH) * mask_token
        new_seen = tl.load(mask + new_slots, is_new & (new_slots < length), 0.0)  # rows without an answer lie behind it
        seen = tl.load(mask + slots, slots < length, 0.0)
    if OVERLAPS:
        gdc_wait()
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_dim = dims < SIZE
    STRIDE: tl.constexpr = HEADS * (GROUP + 2) * SIZE
    first = joint + key_head * (GROUP + 2) * SIZE
    query = first + token * STRIDE + (head % GROUP) * SIZE
    query = _rotated(query, token, cos, sin, dims, dims >= 0, SIZE, TURNS, IS_INTERLEAVED) * SIZE**-0.5  # [1, D]
    lines = first + (tokens * STRIDE + GROUP * SIZE)[:, None]
    new_keys = _rotated(lines, tokens[:, None], cos, sin, dims, is_new[:, None], SIZE, TURNS, IS_INTERLEAVED)
    new_keys = new_keys.to(keys.dtype.element_ty)
    new_values = tl.load(lines + SIZE + dims, is_new[:, None] & is_dim, 0.0)

    most = tl.full([BLOCK_S], -1e30, tl.float32)  # finite, as the difference of two infinities is no number
    totals = tl.zeros([BLOCK_S], tl.float32)
    sums = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in tl.range(0, length - split * BLOCK_S, ahead, num_stages=4):
        slot = start + slots
        is_old = (slot < length) & (tl.sum((slot[:, None] == new_slots[None, :]).to(tl.int32), 1) == 0)
        old_places = (line * capacity + slot)[:, None] * SIZE + dims
        old_keys = tl.load(keys + old_places, is_old[:, None] & is_dim, 0.0)
        old_values = tl.load(values + old_places, is_old[:, None] & is_dim, 0.0)
        scores = tl.sum(old_keys.to(tl.float32) * query, 1)
        if mask is not None:
            scores += seen.to(tl.float32)
            seen = tl.load(mask + slot + ahead, slot + ahead < length, 0.0)  # early: Triton does so for wide loads
        scores = tl.where(is_old, scores, float("-inf"))
        higher = tl.maximum(most, scores)
        fading, weights = tl.exp(most - higher), tl.exp(scores - higher)
        totals = totals * fading + weights
        sums = sums * fading[:, None] + weights[:, None] * old_values.to(tl.float32)
        most = higher

    is_written = (tokens == token)[:, None] & (head % GROUP == 0) & (split == 0) & is_dim
    there = new_places[:, None] * SIZE + dims
    tl.store(keys + there, new_keys, is_written)
    tl.store(values + there, new_values, is_written)
    new_scores = tl.sum(new_keys.to(tl.float32) * query, 1)  # [W]
    if mask is not None:
        new_scores += new_seen.to(tl.float32)
    new_scores = tl.where(is_new & (split == 0), new_scores, float("-inf"))
    highest = tl.maximum(tl.max(most, 0), tl.max(new_scores, 0))
    shares, new_weights = tl.exp(most - highest), tl.exp(new_scores - highest)
    total = tl.sum(totals * shares, 0) + tl.sum(new_weights, 0)
    mixed = tl.sum(sums * shares[:, None], 0) + tl.sum(new_weights[:, None] * new_values.to(tl.float32), 0)  # [D]
    outputs = tl.arange(0, BLOCK_D)
    own = (split * tl.num_programs(1) + token) * HEADS * GROUP + head
    if logs is not None:
        tl.store(logs + own, highest + tl.log(total))
        total = tl.where(total == 0.0, 1.0, total)  # a split that sees nothing gives zeros
    tl.store(result + own * SIZE + outputs, (mixed / total).to(result.dtype.element_ty), outputs < SIZE)
