"""The unigram baseline: the loss of a model that uses nothing but token frequencies."""

from __future__ import annotations

from collections.abc import Iterable
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


def unigram_loss(counts: NDArray[np.int64], targets: Iterable[NDArray[np.int64]], end: int | None) -> float:
    """Mean negative log-likelihood of targets under the corpus's unigram distribution, in nats.

    Counts get one added each, so that no target is impossible. The end-of-answer token, which a corpus does not
    hold, is given its share among the targets themselves: the best that any unigram model could do for it.

    Args:
        counts: [V], of the training tokens.
        targets: arrays of target ids.
        end: id of the end-of-answer token; None if targets have none.
    """
    target_counts = np.zeros(len(counts), dtype=np.int64)
    for some in targets:
        target_counts += np.bincount(some, minlength=len(counts))
    smoothed = counts + 1.0
    if end is not None and target_counts[end] > 0:
        share = target_counts[end] / target_counts.sum()
        smoothed[end] = 0.0
        smoothed[end] = smoothed.sum() * share / (1.0 - share) if share < 1.0 else 1.0
    log_probs = np.log(smoothed / smoothed.sum())  # [V]
    return float(-(target_counts * log_probs).sum() / target_counts.sum())
