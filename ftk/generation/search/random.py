"""Temperature and filters, and random numbers that belong to a prompt, not to a batch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ftk.generation.search._fewest import fewest
from ftk.generation.search.ranking import reads_are_free, stable_topk

_GOLDEN = 0x9E3779B97F4A7C15


def token_probabilities(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
) -> Tensor:
    """The distribution that is drawn from: temperature, top-k, top-p, min-p, typical, in this order.

    Each filter takes what the one before it left as its distribution (made to sum to 1), and leaves one token at
    least; of equally likely tokens those first in the vocabulary stay.

    Args:
        logits: [..., V], or log-probabilities; -inf forbids.
        temperature: divides the logits; above 0.
        top_k: keep this many likeliest tokens; 0, or more than V, keeps all.
        top_p: keep the fewest, likeliest first, that hold at least this share (Holtzman et al. 2020).
        min_p: keep those with at least this share of the likeliest one's probability (Nguyen et al. 2024).
        typical_p: keep the fewest that hold at least this share, those first whose information -log p is nearest
            to the entropy (Meister et al. 2023, locally typical sampling).

    Returns:
        float64 probabilities [..., V] that sum to 1; exactly 0 where a token was filtered away.
    """
    logits = logits.double()
    if temperature != 1.0:  # from the likeliest one's, which stays finite however small the temperature is
        logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if 0 < top_k < logits.size(-1):
        values, kept = stable_topk(logits, top_k)
        filtered = _filtered(values.softmax(-1), top_p, min_p, typical_p)
        return torch.zeros_like(logits).scatter_(-1, kept, filtered)
    return _filtered(logits.softmax(-1), top_p, min_p, typical_p)


def _filtered(probabilities: Tensor, top_p: float, min_p: float, typical_p: float) -> Tensor:
    """Top-p, min-p and typical of [..., X], in this order; made to sum to 1."""
    if top_p < 1.0:
        probabilities = _fewest(probabilities, probabilities, top_p)
    if min_p > 0.0:
        least = min_p * probabilities.amax(-1, keepdim=True)
        probabilities = _normalized(probabilities.masked_fill(probabilities < least, 0.0))
    if typical_p < 1.0:
        information = -probabilities.log()  # inf where there is nothing
        entropy = torch.special.entr(probabilities).sum(-1, keepdim=True)
        probabilities = _fewest(probabilities, -(information - entropy).abs(), typical_p)
    return probabilities


def _fewest(probabilities: Tensor, merits: Tensor, share: float) -> Tensor:
    """The fewest of [..., X] that hold `share`, those of the greatest merit first; made to sum to 1."""
    if reads_are_free(probabilities.device):
        rows, by = (tensor.reshape(-1, tensor.size(-1)).numpy() for tensor in (probabilities, merits))
        return _normalized(torch.from_numpy(fewest(rows, by, share)).view(probabilities.shape))
    order = merits.sort(dim=-1, descending=True, stable=True).indices  # a GPU sorts fast
    own = probabilities.gather(-1, order)
    own = own.masked_fill(own.cumsum(-1) - own >= share, 0.0)
    return _normalized(torch.zeros_like(probabilities).scatter_(-1, order, own))


def _normalized(probabilities: Tensor) -> Tensor:
    """Made to sum to 1, in place."""
    return probabilities.div_(probabilities.sum(-1, keepdim=True))


def draw(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """One token per row by the inverse of the cumulative distribution.

    Args:
        probabilities: float64 [N, V].
        uniforms: float64 [N] in [0, 1).

    Returns:
        int64 [N]; a token of probability 0 is never drawn.
    """
    return _where_reached(probabilities, uniforms * probabilities.sum(-1))[0]


def draw_without_replacement(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """C different ones per prompt, each drawn with probability proportional to its weight among those that are left.

    First the row, then the token in it: a draw reads W + V numbers, not W times V, and nothing large is made.

    Args:
        weights: float64 [N, W, V], at least 0; what is drawn becomes 0 in place.
        uniforms: float64 [N, C] in [0, 1).

    Returns:
        int64 [N, C], indices into [W * V], and bool [N, C]: False where nothing was left that could be drawn.
    """
    prompts = torch.arange(weights.size(0), device=weights.device)
    of_rows = weights.sum(-1)  # [N, W]
    indices, real = torch.empty_like(uniforms, dtype=torch.int64), torch.empty_like(uniforms, dtype=torch.bool)
    for number in range(uniforms.size(1)):
        row, within = _where_reached(of_rows, uniforms[:, number] * of_rows.sum(-1))
        token, _ = _where_reached(weights[prompts, row], within)
        indices[:, number] = row * weights.size(-1) + token
        real[:, number] = weights[prompts, row, token] > 0
        weights[prompts, row, token] = 0.0
        of_rows[prompts, row] = weights[prompts, row].sum(-1)  # anew: exactly 0 when nothing is left in it
    return indices, real


def _where_reached(weights: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Where the running sum of weights, at least 0, float64 [N, X], is first above the targets, float64 [N].

    Returns:
        int64 [N], never a place of weight 0 unless all are, and float64 [N]: the part of the target that is left there.
    """
    cumulative = weights.cumsum(-1)  # [N, X]
    # The first whose running sum is above the target: it holds some weight itself.
    place = torch.searchsorted(cumulative, targets[:, None], right=True)[:, 0]  # [N]
    # A target may round up to the sum: then the last place that holds anything.
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())[:, 0]
    # With NaN all are beyond the end; the engine reports an answer whose score is not finite.
    place = torch.minimum(place, last).clamp(max=weights.size(-1) - 1)[:, None]
    return place[:, 0], targets - (cumulative.gather(1, place) - weights.gather(1, place))[:, 0]


def prompt_key(seed: int, context: Sequence[int]) -> int:
    """A 64-bit key of a prompt and its seed, from which all its random numbers come."""
    text = f"{seed}:" + ",".join(map(str, context))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform_numbers(keys: Sequence[int], stream: int, count: int) -> np.ndarray:
    """Counter-based uniform numbers (splitmix64, Steele et al. 2014).

    Args:
        keys: one 64-bit key per row (`prompt_key`).
        stream: number of the answer, so that each has its own numbers.
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


def step_numbers(keys: Sequence[int], answer: int, num_steps: int, draws: int) -> np.ndarray:
    """The random numbers of one answer: float64 [len(keys), num_steps, draws].

    Number (step, draw) is a function of key, answer, step and draw alone, however many there are of each.
    """
    return np.stack([uniform_numbers(keys, (draw << 32) + answer, num_steps) for draw in range(draws)], axis=2)
