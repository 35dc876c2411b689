"""All documents of a corpus in one ring of tokens, from which samples of one length are cut."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora._ring import RingReader
from ftk.data.corpora.documents import Documents
from ftk.data.indexed.file_map import check_files
from ftk.data.random import SampleRandom
from ftk.data.sample_dataset import check_indices, shortened_length
from ftk.errors import UserError


class TokenRing:
    """Pieces of `length` tokens of a corpus; an epoch goes round the ring once, from a random place on.

    Args:
        vocab_size: V. Other ids than 0 .. V - 1 in a document are an error.
        length: of a piece.
        end: the token that closes a document.
        prefix: tokens that stand in front of each document.
        seed: of where an epoch begins.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(
        self, documents: Documents, vocab_size: int, length: int, end: int, prefix: Sequence[int], seed: int
    ) -> None:
        self.documents, self.length, self.end, self.seed = documents, length, end, seed
        self._longest = length  # of a piece; less in a curriculum
        cumulative = np.cumsum(documents.sizes, dtype=np.int64)
        if not len(cumulative) or cumulative[-1] == 0:
            raise UserError("the data has no tokens")
        self.reader = RingReader(documents, cumulative, vocab_size, prefix, end)

    def __len__(self) -> int:
        """Pieces in an epoch."""
        return math.ceil(self.reader.total / self.length)

    def sizes(self) -> NDArray[np.int32]:
        """Tokens of each piece, int32 [len]: the last may be shorter."""
        sizes = np.full(len(self), self.length, dtype=np.int32)
        sizes[-1] = self.reader.total - (len(self) - 1) * self.length
        return sizes

    def shortened(self, share: float) -> TokenRing:
        """Pieces that begin as these do, and end at a share of the length."""
        made = copy.copy(self)
        made._longest = shortened_length(self.length, share)
        return made

    def pieces(
        self, epoch: int, indices: NDArray[np.integer], pad: int, more: int = 0
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Several pieces, and `more` tokens behind each; `pad` stands behind the shorter ones.

        Returns:
            The tokens; how many documents have begun behind the first token up to each; int64 [B, T + more] both. The
            lengths of the pieces, int64 [B].

        Raises:
            UserError: the data holds a token outside the vocabulary.
        """
        numbers: NDArray[np.int64] = np.asarray(indices, dtype=np.int64)
        check_indices(numbers, len(self))
        total = self.reader.total
        first = SampleRandom(self.seed, epoch, 0).below(total)
        lengths = np.minimum(self._longest, total - numbers * self.length)
        return *self.reader.read((first + numbers * self.length) % total, lengths + more, pad), lengths

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        check_files(self.documents)
