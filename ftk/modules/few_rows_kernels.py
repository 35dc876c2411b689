"""Products and attention of few rows as kernels of Triton, which `few_rows_triton` launches for a layer.

On Hopper and newer a kernel begins while the one before it ends (programmatic dependent launch, `OVERLAPS`): it loads
what kernels of torch have written, such as its weights and the mask, and only then waits for what the other gives.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def one_row(
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
    logs,  # [SPLITS, M, HEADS] or None, see `attended`
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
def some_rows(
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
    """Some outputs of all rows, as `one_row`. Each warp has a part of each block of inputs, as one alone would add up
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


@triton.jit(
    do_not_specialize=["mask_row", "mask_token", "length", "capacity"],
    do_not_specialize_on_alignment=["places", "mask", "cos", "sin"],
)
def attended(
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
