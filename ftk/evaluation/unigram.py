"""The unigram baseline: the loss of a model that uses nothing but token frequencies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Documents(Protocol):
    """Documents as arrays of token ids."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> NDArray: ...  # [T] integer


def token_counts(documents: Documents, vocab_size: int) -> NDArray[np.int64]:
    """How often each id comes in a corpus, int64 [vocab_size]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for index in range(len(documents)):
        counts += np.bincount(np.asarray(documents[index], dtype=np.int64), minlength=vocab_size)
    return counts


def unigram_loss(
    counts: NDArray[np.int64], targets: Iterable[NDArray[np.int64]], special_tokens: Collection[int]
) -> float:
    """Mean negative log-likelihood of targets under the corpus's unigram distribution, in nats.

    Each count is increased by one, so that no target is impossible. Special tokens that the corpus does not hold (the
    end of an answer) get their share among the targets themselves: the best that a unigram model can do for them.

    Args:
        counts: [V], of the training tokens.
        targets: arrays of target ids.
        special_tokens: their ids.
    """
    target_counts = np.zeros(len(counts), dtype=np.int64)
    for some in targets:
        target_counts += np.bincount(some, minlength=len(counts))
    smoothed = counts + 1.0
    added = [token for token in sorted(special_tokens) if counts[token] == 0 and target_counts[token] > 0]
    if added:
        share = target_counts[added].sum() / target_counts.sum()
        smoothed[added] = 0.0
        total = smoothed.sum() * share / (1.0 - share) if share < 1.0 else 1.0
        smoothed[added] = total * target_counts[added] / target_counts[added].sum()
    log_probs = np.log(smoothed / smoothed.sum())  # [V]
    return float(-(target_counts * log_probs).sum() / target_counts.sum())
