"""Samples of causal language modeling: all documents, each closed by an end token, cut into pieces of one length."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora.documents import Documents
from ftk.data.corpora.ring import TokenRing

if TYPE_CHECKING:
    from ftk.tasks.causal_lm.task import CausalLMConfig


class CausalDataset:
    """Pieces of `seq_length` tokens of a corpus, each a pure function of (seed, epoch, index).

    In an epoch each token is a target once.

    Args:
        documents: the corpus, with `.sizes`.
        end: the token that closes a document.
        prefix: tokens that stand in front of each document, as of a prompt.
        config: of the task.
        seed: of where an epoch begins.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(
        self, documents: Documents, end: int, config: CausalLMConfig, seed: int, prefix: Sequence[int] = ()
    ) -> None:
        self.ring = TokenRing(documents, config.seq_length, end, prefix, seed)
        self.config = config

    def __len__(self) -> int:
        return len(self.ring)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each sample, int32 [len]."""
        return self.ring.sizes()

    def shortened(self, share: float) -> CausalDataset:
        """Samples that begin as these do, and end at a share of `seq_length`."""
        made = copy.copy(self)
        made.ring = self.ring.shortened(share)
        return made

    def sample(self, epoch: int, index: int) -> dict[str, NDArray]:
        """One sample as arrays.

        Returns:
            tokens, targets, position_ids: int64 [T]; loss_mask: bool [T]; document_ids: int64 [T] with a document mask.
        """
        text, numbers = self.ring.piece(epoch, index, more=1)  # [T + 1] each
        length = len(text) - 1
        same = numbers[1:] == numbers[:-1]  # [T]: the next token is of the same document
        places = np.arange(length)
        sample = {"tokens": text[:-1], "targets": text[1:], "loss_mask": np.ones(length, bool), "position_ids": places}
        if self.config.restart_positions:
            begins = np.append(True, ~same[:-1])
            sample["position_ids"] = places - np.maximum.accumulate(np.where(begins, places, 0))
        if self.config.document_mask:
            sample["document_ids"] = numbers[:-1]
            sample["loss_mask"] &= same
        if not self.config.end_loss:
            sample["loss_mask"] &= sample["targets"] != self.ring.end
        return sample

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        self.ring.check_files()
