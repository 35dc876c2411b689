"""Attention behind a prefix as kernels of Triton, forward and backward, with dropout; `prefix_attention` launches them.

The keys that a block of queries sees are a whole number of blocks that it sees whole, which need no mask, and few that
it sees in part (FlashAttention-2, Dao 2023, with the prefix of Du et al. 2022, 2.1). Scores are in base 2, as the GPU
has no other exponential.

Whether a weight is dropped is a hash of two random words, one of its query and one of its key: a weight costs one
multiplication, where Philox takes forty, and the backward kernels need no mask from memory.

Queries, keys and values are read where their joint projection leaves them, and their gradients written in the same
form, so that nothing is copied in front of its products.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["threshold", "heads"])
def attend(
    joint,  # [B, T, K, A/K + 2, D]: of each key head its queries, the key, the value
    prefix,  # int64 [B]
    words,  # int32 [B, A, 2, T], of queries and of keys, or None
    result,  # [B, T, A, D]
    logs,  # float32 [B, A, T], of the sums of the exponentials, in base 2
    heads,  # A
    length,  # T
    scale,  # of the scores, times log2(e)
    threshold,  # words below it drop a weight
    factor,  # of those that stay
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Some queries of a head."""
    start, head, row = tl.program_id(0) * BLOCK_Q, tl.program_id(1), tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    queries = start + tl.arange(0, BLOCK_Q)
    is_query = queries < length
    width = _width(heads, GROUP, SIZE)
    query, key, value = _places(row * length * width, head // GROUP, head % GROUP, GROUP, SIZE)
    lines = joint + query + queries[:, None] * width + dims[None, :]
    own = tl.load(lines, is_query[:, None] & (dims < SIZE)[None, :], 0.0)
    line = row * heads + head
    end = tl.load(prefix + row).to(tl.int32)
    query_words = queries
    if words is not None:
        words += line * 2 * length
        query_words = tl.load(words + queries, is_query, 0)
        words += length
    whole = tl.minimum(tl.maximum(end, start + 1), length) // BLOCK_K * BLOCK_K
    last = tl.minimum(tl.maximum(end, start + BLOCK_Q), length)
    most = tl.full([BLOCK_Q], -1e30, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    sums = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    most, total, sums = _attend_to(
        most, total, sums, own, joint + key, joint + value, words, width, queries, query_words, 0, whole, end, length,
        scale, threshold, False, SIZE, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    most, total, sums = _attend_to(
        most, total, sums, own, joint + key, joint + value, words, width, queries, query_words, whole, last, end,
        length, scale, threshold, True, SIZE, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    sums *= (factor / total)[:, None]
    there = result + ((row * length + queries) * heads + head)[:, None] * SIZE + dims[None, :]
    tl.store(there, sums.to(result.dtype.element_ty), is_query[:, None] & (dims < SIZE)[None, :])
    tl.store(logs + line * length + queries, most + tl.log2(total), is_query)


@triton.jit
def _attend_to(
    most, total, sums, own, key, value, words, width, queries, query_words, begin, last, end, length,
    scale, threshold, IN_PART: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    is_dim = (dims < SIZE)[:, None]
    for start in tl.range(begin, last, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        if IN_PART:
            turned = tl.load(
                key + keys[None, :] * width + dims[:, None], is_dim & (keys < length)[None, :], 0.0
            )  # [D, K]
        else:
            turned = tl.load(key + keys[None, :] * width + dims[:, None], is_dim, 0.0)
        scores = tl.dot(own, turned) * scale
        if IN_PART:
            scores = tl.where(_is_seen(queries[:, None], keys[None, :], end), scores, -1e30)
        higher = tl.maximum(most, tl.max(scores, 1))
        fading = tl.exp2(most - higher)
        weights = tl.exp2(scores - higher[:, None])
        total = total * fading + tl.sum(weights, 1)
        most = higher
        if words is not None:
            key_words = tl.load(words + keys, keys < length, 0)
            weights = tl.where(_stays(query_words[:, None], key_words[None, :], threshold), weights, 0.0)
        if IN_PART:
            values = tl.load(
                value + keys[:, None] * width + dims[None, :],
                (keys < length)[:, None] & (dims < SIZE)[None, :],
                0.0,
            )
        else:
            values = tl.load(value + keys[:, None] * width + dims[None, :], (dims < SIZE)[None, :], 0.0)
        sums = tl.dot(weights.to(values.dtype), values, sums * fading[:, None])
    return most, total, sums


@triton.jit
def shares(
    result,  # [B, T, A, D]
    grad,  # [B, T, A, D]
    sums,  # float32 [B, A, T], of their products
    heads,
    length,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """What the softmax takes away from a query's gradients."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries, dims = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_D)
    there = (queries < length)[:, None] & (dims < SIZE)[None, :]
    places = ((row * length + queries) * heads + head)[:, None] * SIZE + dims[None, :]
    given, slopes = tl.load(result + places, there, 0.0), tl.load(grad + places, there, 0.0)
    found = tl.sum(given.to(tl.float32) * slopes.to(tl.float32), 1)
    tl.store(sums + (row * heads + head) * length + queries, found, queries < length)


@triton.jit(do_not_specialize=["threshold", "heads"])
def key_gradients(
    joint,
    prefix,
    words,
    grad,  # [B, T, A, D], of the result
    logs,
    sums,  # of `shares`
    joint_grad,  # as `joint`
    heads,
    length,
    scale,
    unit,  # of the scores
    threshold,
    factor,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of some keys and values of a head, by the queries that see them."""
    start, head, row = tl.program_id(0) * BLOCK_K, tl.program_id(1), tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    keys = start + tl.arange(0, BLOCK_K)
    is_key = keys < length
    is_there = is_key[:, None] & (dims < SIZE)[None, :]
    width = _width(heads, GROUP, SIZE)
    first, key, value = _places(row * length * width, head, 0, GROUP, SIZE)
    lines = keys[:, None] * width + dims[None, :]
    own_key = tl.load(joint + key + lines, is_there, 0.0)
    own_value = tl.load(joint + value + lines, is_there, 0.0)
    end = tl.load(prefix + row).to(tl.int32)
    found_key = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    found_value = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    # Queries before `begin` see none of the keys, those from `whole` on see all.
    begin = tl.where(start < end, 0, start // BLOCK_Q * BLOCK_Q)
    whole = tl.where(start + BLOCK_K <= end, 0, tl.cdiv(start + BLOCK_K - 1, BLOCK_Q) * BLOCK_Q)
    whole = tl.minimum(whole, tl.cdiv(length, BLOCK_Q) * BLOCK_Q)
    for member in tl.range(GROUP):
        each = head * GROUP + member
        line = row * heads + each
        query, grads = joint + first + member * SIZE, grad + (row * length * heads + each) * SIZE
        key_words, query_words = keys, words
        if words is not None:
            query_words = words + line * 2 * length
            key_words = tl.load(query_words + length + keys, is_key, 0)
        found_key, found_value = _gather(
            found_key, found_value, own_key, own_value, query, grads, logs + line * length, sums + line * length,
            query_words, width, heads * SIZE, keys, key_words, begin, whole, end, length, scale, threshold, factor,
            True, SIZE, BLOCK_D, BLOCK_Q,
        )  # fmt: skip
        found_key, found_value = _gather(
            found_key, found_value, own_key, own_value, query, grads, logs + line * length, sums + line * length,
            query_words, width, heads * SIZE, keys, key_words, whole, length, end, length, scale, threshold, factor,
            False, SIZE, BLOCK_D, BLOCK_Q,
        )  # fmt: skip
    tl.store(joint_grad + key + lines, (found_key * unit).to(joint_grad.dtype.element_ty), is_there)
    tl.store(joint_grad + value + lines, (found_value * factor).to(joint_grad.dtype.element_ty), is_there)


@triton.jit
def _gather(
    found_key, found_value, own_key, own_value, query, grad, logs, sums, words, width, grad_width, keys,
    key_words, begin, last, end, length, scale, threshold, factor, IN_PART: tl.constexpr, SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, last, BLOCK_Q):
        queries = start + tl.arange(0, BLOCK_Q)
        is_query = queries < length
        is_there = is_query[:, None] & (dims < SIZE)[None, :]
        given = tl.load(query + queries[:, None] * width + dims[None, :], is_there, 0.0)
        log = tl.load(logs + queries, is_query, 1e30)
        weights = tl.exp2(tl.dot(own_key, tl.trans(given)) * scale - log[None, :])  # [K, Q]
        if IN_PART:
            weights = tl.where(_is_seen(queries[None, :], keys[:, None], end), weights, 0.0)
        grads = tl.load(grad + queries[:, None] * grad_width + dims[None, :], is_there, 0.0)
        slopes = tl.dot(own_value, tl.trans(grads))
        kept = weights
        if words is not None:
            query_words = tl.load(words + queries, is_query, 0)
            stays = _stays(query_words[None, :], key_words[:, None], threshold)
            kept = tl.where(stays, weights, 0.0)
            slopes = tl.where(stays, slopes * factor, 0.0)
        found_value = tl.dot(kept.to(grads.dtype), grads, found_value)
        slopes = weights * (slopes - tl.load(sums + queries, is_query, 0.0)[None, :])
        found_key = tl.dot(slopes.to(given.dtype), given, found_key)
    return found_key, found_value


@triton.jit(do_not_specialize=["threshold", "heads"])
def query_gradients(
    joint,
    prefix,
    words,
    grad,
    logs,
    sums,
    joint_grad,
    heads,
    length,
    scale,
    unit,
    threshold,
    factor,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Of some queries of a head."""
    start, head, row = tl.program_id(0) * BLOCK_Q, tl.program_id(1), tl.program_id(2).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    queries = start + tl.arange(0, BLOCK_Q)
    is_query = queries < length
    is_there = is_query[:, None] & (dims < SIZE)[None, :]
    width = _width(heads, GROUP, SIZE)
    query, key, value = _places(row * length * width, head // GROUP, head % GROUP, GROUP, SIZE)
    lines = queries[:, None] * width + dims[None, :]
    own = tl.load(joint + query + lines, is_there, 0.0)
    places = ((row * length + queries) * heads + head)[:, None] * SIZE + dims[None, :]
    grads = tl.load(grad + places, is_there, 0.0)
    line = row * heads + head
    log = tl.load(logs + line * length + queries, is_query, 1e30)
    share = tl.load(sums + line * length + queries, is_query, 0.0)
    end = tl.load(prefix + row).to(tl.int32)
    query_words = queries
    if words is not None:
        words += line * 2 * length
        query_words = tl.load(words + queries, is_query, 0)
        words += length
    whole = tl.minimum(tl.maximum(end, start + 1), length) // BLOCK_K * BLOCK_K
    last = tl.minimum(tl.maximum(end, start + BLOCK_Q), length)
    found = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    found = _descend(
        found, own, grads, joint + key, joint + value, words, width, queries, query_words, log, share, 0, whole, end,
        length, scale, threshold, factor, False, SIZE, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    found = _descend(
        found, own, grads, joint + key, joint + value, words, width, queries, query_words, log, share, whole, last,
        end, length, scale, threshold, factor, True, SIZE, BLOCK_D, BLOCK_K,
    )  # fmt: skip
    tl.store(joint_grad + query + lines, (found * unit).to(joint_grad.dtype.element_ty), is_there)


@triton.jit
def _descend(
    found, own, grads, key, value, words, width, queries, query_words, log, share, begin, last, end,
    length, scale, threshold, factor, IN_PART: tl.constexpr, SIZE: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    for start in tl.range(begin, last, BLOCK_K):
        keys = start + tl.arange(0, BLOCK_K)
        is_there = (keys < length)[:, None] & (dims < SIZE)[None, :]
        given = tl.load(key + keys[:, None] * width + dims[None, :], is_there, 0.0)
        values = tl.load(value + keys[:, None] * width + dims[None, :], is_there, 0.0)
        weights = tl.exp2(tl.dot(own, tl.trans(given)) * scale - log[:, None])
        if IN_PART:
            weights = tl.where(_is_seen(queries[:, None], keys[None, :], end), weights, 0.0)
        slopes = tl.dot(grads, tl.trans(values))
        if words is not None:
            key_words = tl.load(words + keys, keys < length, 0)
            stays = _stays(query_words[:, None], key_words[None, :], threshold)
            slopes = tl.where(stays, slopes * factor, 0.0)
        slopes = weights * (slopes - share[:, None])
        found = tl.dot(slopes.to(given.dtype), given, found)
    return found


@triton.jit
def _width(heads, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Numbers of a token in the joint projection."""
    return heads // GROUP * ((GROUP + 2) * SIZE)


@triton.jit
def _places(begin, key_head, member, GROUP: tl.constexpr, SIZE: tl.constexpr):
    """Where in the joint projection of a sequence a query head of a key head lies, and the key and the value."""
    first = begin + key_head * ((GROUP + 2) * SIZE)
    return first + member * SIZE, first + GROUP * SIZE, first + (GROUP + 1) * SIZE


@triton.jit
def _is_seen(queries, keys, end):
    return (keys <= queries) | (keys < end)


@triton.jit
def _stays(query_words, key_words, threshold):
    """Whether a weight stays: by the high bits of a product (multiplicative hashing, Knuth, vol. 3, 6.4)."""
    word = (query_words ^ key_words).to(tl.uint32, bitcast=True) * 0x9E3779B1
    return word >= threshold.to(tl.uint32)
