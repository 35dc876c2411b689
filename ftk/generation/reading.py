"""Which chunks of tokens a model reads together, so that little of what it computes is padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CALL_TOKENS_CPU, CALL_TOKENS_GPU = 16, 256
"""What one more call of the model costs, in tokens that it could read in that time: all weights are read from memory
once more, and a GPU's kernels are started once more (glm_base: 25 ms a call and 1.6 ms a token on two cores)."""


def parts(lengths: Sequence[int], call_tokens: int) -> list[list[int]]:
    """Splits chunks into parts, each padded to its longest chunk, of the least cost in all.

    A part of n chunks costs `call_tokens` + n * longest. Chunks of a part are neighbours in length, so that a
    dynamic programme over the sorted lengths finds the best split.

    Args:
        lengths: of the chunks, in tokens.
        call_tokens: what a part costs beside its tokens.

    Returns:
        for each part the numbers of its chunks; parts with longer chunks come first.
    """
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")  # longest first
    longest = np.asarray(lengths, dtype=np.int64)[order]
    count = len(longest)
    costs = np.zeros(count + 1, dtype=np.int64)  # of the first n chunks
    begins = np.zeros(count + 1, dtype=np.int64)  # of the part that ends with the n-th
    for end in range(1, count + 1):
        candidates = costs[:end] + call_tokens + (end - np.arange(end)) * longest[:end]
        begins[end] = candidates.argmin()
        costs[end] = candidates[begins[end]]
    found: list[list[int]] = []
    end = count
    while end:
        begin = int(begins[end])
        found.append(order[begin:end].tolist())
        end = begin
    return found[::-1]
