"""The unigram baseline: the loss of a model that uses nothing but token frequencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ftk.data.corpora.documents import Documents

MAX_COUNTED = 1 << 22  # tokens; more would change no digit that is shown
_BLOCK = 1 << 20  # tokens that are counted at once

Sums = dict[str, tuple[float, float]]


def token_counts(documents: Documents, vocab_size: int, max_tokens: int = MAX_COUNTED) -> NDArray[np.int64]:
    """How often each id occurs in documents, int64 [vocab_size].

    Of many documents, some that are spread evenly over all are counted: about `max_tokens` tokens.
    """
    some = np.linspace(0, len(documents) - 1, min(len(documents), 64), dtype=np.int64).tolist()
    mean = max(1.0, sum(len(documents[index]) for index in some) / max(1, len(some)))
    step = max(1, round(len(documents) * mean / max_tokens))
    counts = np.zeros(vocab_size, dtype=np.int64)
    block: list[NDArray[np.integer]] = []
    waiting = 0
    for index in range(0, len(documents), step):
        block.append(np.asarray(documents[index]))
        waiting += len(block[-1])
        if waiting >= _BLOCK or index + step >= len(documents):
            counts += np.bincount(np.concatenate(block).astype(np.int64), minlength=vocab_size)
            block, waiting = [], 0
    return counts


class Unigram:
    """Token frequencies as a model. Its loss adds up over batches and ranks, as (sum, count) pairs by name.

    Counts get one added each, so that no target is impossible. Special tokens that the documents do not hold (the end
    of an answer) get their share among the targets themselves, the best that any unigram model could do for them.

    Args:
        counts: [V], of the training tokens.
        special: ids of the special tokens.
    """

    def __init__(self, counts: NDArray[np.int64], special: Iterable[int]) -> None:
        self._absent = [index for index in sorted(set(special)) if counts[index] == 0]
        smoothed = counts + 1.0
        smoothed[self._absent] = 0.0
        nats = np.log(smoothed.sum()) - np.log(np.maximum(smoothed, 1.0))  # [V]
        nats[self._absent] = 0.0
        self._nats = nats

    def sums(self, targets: NDArray[np.integer], weights: NDArray[np.floating] | None = None) -> Sums:
        """What a batch adds: the nats of its targets without the absent tokens, and how many of each of those it has.

        Args:
            targets: [N] ids.
            weights: [N]; None: 1 each.
        """
        if weights is None:
            weights = np.ones(len(targets))
        sums = {"unigram": (float(self._nats[targets] @ weights), float(weights.sum()))}
        counts = np.bincount(targets, weights, minlength=len(self._nats))[self._absent].tolist()
        absent = zip(self._absent, counts, strict=True)
        return sums | {f"unigram {token}": (count, 1.0) for token, count in absent if count}

    @staticmethod
    def loss(sums: Mapping[str, tuple[float, float]]) -> float:
        """Nats per target of added-up sums."""
        nats, number = sums["unigram"]
        absent = [count for name, (count, _) in sums.items() if name.startswith("unigram ")]
        present = number - sum(absent)
        shares = [count / number for count in (*absent, present) if count > 0.0]
        return float(nats / number - sum(share * np.log(share) for share in shares))
