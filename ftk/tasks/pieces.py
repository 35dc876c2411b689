"""Texts of one length between the tokens of beginning and end, and what a tokenizer says of its tokens."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.data.batches.collate import SampleBatch
from ftk.data.corpora.documents import Documents
from ftk.data.corpora.ring import TokenRing
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

NEVER, BEGINS, CONTINUES = range(3)
_MARKS = ("▁", "Ġ")  # of SentencePiece and of byte-level BPE, in front of a word


class Tokens(NamedTuple):
    """What a tokenizer says of its tokens.

    Attributes:
        first, last: close a text in, and one part of it off the next; a corpus' documents too.
        mask: hides a token.
        pad: fills short texts.
        kind: uint8 [V], of each token NEVER, BEGINS or CONTINUES (a word), for `hide`.
        others: int64 [W], those that may stand for a hidden one.
    """

    first: int
    last: int
    mask: int
    pad: int
    kind: NDArray[np.uint8]
    others: NDArray[np.int64]

    @classmethod
    def of(cls, tokenizer: Tokenizer, task: str, *, whole_words: bool = False, spares_ends: bool = False) -> Tokens:
        """The tokens of a tokenizer.

        Args:
            task: for messages.
            whole_words: whether a word is hidden with all of its pieces; else each token is a word.
            spares_ends: as BERT, which never hides `first` and `last`, but puts any token in the place of a hidden one.
                RoBERTa and BART hide those as well (fairseq: MaskTokensDataset).

        Raises:
            UserError: one of these is missing.
        """
        first, last, mask, pad = special_ids(tokenizer, task)
        ids = np.arange(tokenizer.vocab_size)
        reserved = np.isin(ids, list(tokenizer.special.roles.values()))
        kind = np.full(len(ids), BEGINS, dtype=np.uint8)
        if whole_words:
            kind[_continues([tokenizer.token_text(int(id_)) for id_ in ids])] = CONTINUES
            kind[reserved] = BEGINS
        if spares_ends:
            kind[np.array([first, last], dtype=np.int64)] = NEVER
        return cls(first, last, mask, pad, kind, ids if spares_ends else ids[~reserved])


def special_ids(tokenizer: Tokenizer, task: str) -> tuple[int, int, int, int]:
    """The ids of the first and the last token of a text, of the mask and of padding.

    Raises:
        UserError: one of these is missing.
    """
    special = tokenizer.special
    first = special.bos if special.cls is None else special.cls
    last = special.eos if special.sep is None else special.sep
    found = {"cls": first, "sep": last, "mask": special.mask, "pad": special.pad}
    for role, token in found.items():
        if token is None:
            raise UserError(f"the tokenizer {tokenizer.name} has no {role} token, which {task} needs")
    return tuple(found.values())  # type: ignore[return-value]


def _continues(spellings: Sequence[str]) -> NDArray[np.bool_]:
    """bool [V], whether a piece belongs to the word of the piece before it."""
    if any(text.startswith("##") for text in spellings):
        return np.array([text.startswith("##") for text in spellings])
    # Chinese is written without spaces: each of its characters is a word.
    return np.array([not text.startswith(_MARKS) and not "\u2e80" <= text[:1] <= "\u9fff" for text in spellings])


class Pieces:
    """Texts of `seq_length` tokens, across documents, between the tokens of beginning and end.

    Args:
        seq_length: of a text, these two counted.
        seed: of where an epoch begins.
    """

    def __init__(self, documents: Documents, tokens: Tokens, seq_length: int, seed: int) -> None:
        self.tokens = tokens
        self.ring = TokenRing(documents, len(tokens.kind), seq_length - 2, tokens.last, (), seed)

    def __len__(self) -> int:
        return len(self.ring)

    def sizes(self) -> NDArray[np.int32]:
        """Tokens of each text at most, int32 [len]."""
        return self.ring.sizes() + np.int32(2)

    def shortened(self, share: float) -> Pieces:
        """Texts that begin as these do, and end at a share of the length."""
        made = copy.copy(self)
        made.ring = self.ring.shortened(share)
        return made

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        self.ring.check_files()

    def texts(self, epoch: int, indices: NDArray[np.integer]) -> SampleBatch:
        """Several texts: tokens int64 [T] each."""
        pieces, _, lengths = self.ring.pieces(epoch, indices, self.tokens.pad)
        texts = np.full((len(pieces), pieces.shape[1] + 2), self.tokens.pad, dtype=np.int64)
        texts[:, 0] = self.tokens.first
        texts[:, 1:-1] = pieces
        texts[np.arange(len(texts)), lengths + 1] = self.tokens.last
        return SampleBatch({"tokens": texts}, lengths + 2)
