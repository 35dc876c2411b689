"""Samples of causal language modeling: all documents, each closed by an end token, cut into pieces of one length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora.documents import Documents
from ftk.data.indexed.file_map import check_files
from ftk.data.random import SampleRandom
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tasks.causal_lm.task import CausalLMConfig


class CausalDataset:
    """Pieces of `seq_length` tokens of a corpus, each a pure function of (seed, epoch, index).

    The documents form a ring, and an epoch goes round it once, from a random place on: each token is a target once.

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
        self.documents, self.end, self.config, self.seed = documents, end, config, seed
        self.seq_length = config.seq_length
        # Tokens up to the end of each document, prefix and end token counted, [D].
        self.prefix = np.asarray(prefix, dtype=np.int64)
        self.ends = np.cumsum(np.asarray(documents.sizes, dtype=np.int64) + 1 + len(self.prefix))
        if not len(self.ends) or self.ends[-1] == len(self.ends) * (1 + len(self.prefix)):
            raise UserError("the data has no tokens")

    def __len__(self) -> int:
        return math.ceil(int(self.ends[-1]) / self.seq_length)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each sample, int32 [len]."""
        sizes = np.full(len(self), self.seq_length, dtype=np.int32)
        sizes[-1] = self.ends[-1] - (len(self) - 1) * self.seq_length
        return sizes

    def sample(self, epoch: int, index: int) -> dict[str, NDArray]:
        """One sample as arrays.

        Returns:
            tokens, targets, position_ids: int64 [T]; loss_mask: bool [T]; document_ids: int64 [T] with a document mask.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        total = int(self.ends[-1])
        length = min(self.seq_length, total - index * self.seq_length)
        start = SampleRandom(self.seed, epoch, 0).below(total) + index * self.seq_length
        text, numbers = self._read(start % total, length + 1)  # [T + 1] each
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
            sample["loss_mask"] &= sample["targets"] != self.end
        return sample

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        check_files(self.documents)

    def _read(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of the ring from a place on, and how many documents begin after it up to each: int64 [length]."""
        text = np.full(length, self.end, dtype=np.int64)  # what no document fills stays an end token
        numbers = np.empty(length, dtype=np.int64)
        document = int(np.searchsorted(self.ends, start, side="right"))
        inside = start - (int(self.ends[document - 1]) if document else 0)
        at = number = 0
        while at < length:
            tokens = self.documents[document]
            if len(self.prefix):
                tokens = np.concatenate((self.prefix, tokens))
            tokens = tokens[inside : inside + length - at]
            text[at : at + len(tokens)] = tokens
            numbers[at : at + len(tokens) + 1] = number
            at += len(tokens) + 1
            document, inside, number = (document + 1) % len(self.ends), 0, number + 1
        return text, numbers
