"""All documents of a corpus in one ring of tokens, from which samples of one length are cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora.documents import Documents
from ftk.data.indexed.file_map import check_files
from ftk.data.random import SampleRandom
from ftk.data.sample_dataset import shortened_length
from ftk.errors import UserError


class TokenRing:
    """Pieces of `length` tokens of a corpus; an epoch goes round the ring once, from a random place on.

    Args:
        documents: the corpus, with `.sizes`.
        length: of a piece.
        end: the token that closes a document.
        prefix: tokens that stand in front of each document.
        seed: of where an epoch begins.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(self, documents: Documents, length: int, end: int, prefix: Sequence[int], seed: int) -> None:
        self.documents, self.length, self.end, self.seed = documents, length, end, seed
        self._longest = length  # of a piece; less in a curriculum
        self.prefix = np.asarray(prefix, dtype=np.int64)
        # Tokens up to the end of each document, prefix and end token counted, [D].
        self.ends = np.cumsum(np.asarray(documents.sizes, dtype=np.int64) + 1 + len(self.prefix))
        if not len(self.ends) or self.ends[-1] == len(self.ends) * (1 + len(self.prefix)):
            raise UserError("the data has no tokens")

    def __len__(self) -> int:
        """Pieces in an epoch."""
        return math.ceil(int(self.ends[-1]) / self.length)

    def sizes(self) -> NDArray[np.int32]:
        """Tokens of each piece, int32 [len]: the last may be shorter."""
        sizes = np.full(len(self), self.length, dtype=np.int32)
        sizes[-1] = self.ends[-1] - (len(self) - 1) * self.length
        return sizes

    def shortened(self, share: float) -> TokenRing:
        """Pieces that begin as these do, and end at a share of the length."""
        made = copy.copy(self)
        made._longest = shortened_length(self.length, share)
        return made

    def piece(self, epoch: int, index: int, more: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """A piece, and `more` tokens behind it.

        Returns:
            The tokens, and how many documents begin after the first up to each: int64 [T + more] each.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        total = int(self.ends[-1])
        length = min(self._longest, total - index * self.length)
        start = SampleRandom(self.seed, epoch, 0).below(total) + index * self.length
        return self._read(start % total, length + more)

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        check_files(self.documents)

    def _read(self, start: int, length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """`length` tokens from a place of the ring on, see `piece`."""
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
