"""Temperature, top-k and top-p, and random numbers that belong to a prompt, not to a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15


def token_probabilities(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The distribution that is drawn from: temperature, then top-k, then top-p of what top-k left.

    Args:
        logits: [..., V].
        temperature: divides the logits; above 0.
        top_k: keep this many likeliest tokens; 0, or more than V, keeps all.
        top_p: of those keep the fewest, likeliest first, that hold at least this share; one at least.

    Returns:
        float64 probabilities [..., V] that sum to 1; exactly 0 where a token was filtered away.
    """
    logits = logits.double() / temperature
    num_tokens = logits.size(-1)
    kept = num_tokens if top_k == 0 else min(top_k, num_tokens)
    if kept == num_tokens and top_p >= 1.0:
        return logits.softmax(-1)
    values, indices = logits.topk(kept, dim=-1)  # sorted; by index, so that ties never let k + 1 tokens pass
    probabilities = values.softmax(-1)  # [..., kept]
    if top_p < 1.0:
        before = probabilities.cumsum(-1) - probabilities  # what the likelier tokens hold already
        probabilities = probabilities.masked_fill(before >= top_p, 0.0)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter_(-1, indices, probabilities)


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by the inverse of the cumulative distribution.

    Args:
        probabilities: float64 [N, V].
        uniforms: float64 [N] in [0, 1).

    Returns:
        int64 [N]; a token of probability 0 is never drawn.
    """
    cumulative = probabilities.cumsum(-1)  # [N, V]
    targets = uniforms[:, None] * cumulative[:, -1:]
    # The first token whose cumulative share is above the target: it holds some probability itself.
    token = torch.searchsorted(cumulative, targets, right=True)[:, 0]  # [N]
    # u * total may round up to total: then the last token that holds anything.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    return torch.minimum(token, last)


def prompt_key(seed: int, context: Sequence[int]) -> int:
    """A 64-bit key of a prompt and its seed, from which all its random numbers come."""
    text = f"{seed}:" + ",".join(map(str, context))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform_numbers(keys: Sequence[int], stream: int, count: int) -> np.ndarray:
    """Counter-based uniform numbers (splitmix64, Steele et al. 2014).

    Args:
        keys: one 64-bit key per row (`prompt_key`).
        stream: number of the blank, so that each blank has its own numbers.
        count: numbers per row.

    Returns:
        float64 [len(keys), count] in [0, 1), a function of (key, stream, column) alone.
    """
    key = _mix(np.asarray(keys, dtype=np.uint64) + np.uint64(stream * _GOLDEN % 2**64))  # [N]
    counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)  # [count]
    bits = _mix(key[:, None] + counter[None, :])  # [N, count]; unsigned array arithmetic wraps around
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
