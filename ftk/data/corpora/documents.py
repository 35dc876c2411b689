"""Packing documents: draws documents by their length and cuts them, at sentences, into one text of seq_length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora._documents import TextPacker
from ftk.data.indexed.file_map import check_files
from ftk.data.random import hash_uniform
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tokenizers import SpecialTokens, Tokenizer

SENTENCE_END_CHARACTERS = ".?!;:\n。？！；：…"
_CLOSING_CHARACTERS = "\"'”’」』）)]》】 "


class Documents(Protocol):
    """Token ids by document: an IndexedDataset, or any sequence of arrays with their sizes.

    Documents that also offer `tokens`, an array of all of them back to back, or a `pool` with their `starts` (a
    `DocumentSubset`), are read from there without Python.
    """

    @property
    def sizes(self) -> NDArray[np.integer]: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> NDArray[np.integer]: ...


class DocumentList:
    """Documents held in memory.

    Args:
        documents: token ids of each document.
    """

    def __init__(self, documents: Sequence[Any]) -> None:
        self._documents = [_token_ids(number, document) for number, document in enumerate(documents)]
        self.sizes = np.array([len(document) for document in self._documents], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self._documents[index]


def _token_ids(number: int, document: Any) -> NDArray[np.int64]:
    ids = np.asarray(document)
    if ids.size and ids.dtype.kind not in "iu":
        raise TypeError(f"document {number} holds {ids.dtype}; it must hold token ids, integers")
    return ids.astype(np.int64, copy=False)


class TokenizedDocuments:
    """Documents back to back in one array.

    Args:
        tokens: all of them, [sum of sizes].
        sizes: tokens in each, int32 [D].
    """

    def __init__(self, tokens: NDArray[Any], sizes: NDArray[np.int32]) -> None:
        self.tokens = tokens
        self.sizes = sizes
        self.offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))  # [D + 1]

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]

    def check_files(self) -> None:
        """Raises OSError if the file of the tokens has become shorter."""
        check_files(self.tokens)


class DocumentPacker:
    """Draws texts of at most seq_length tokens: [CLS], text, end of document, as many times as fit.

    Documents are drawn in proportion to their length. One that is too long for an empty text starts at a random place,
    moved to the start of a sentence; one that is too long for the room that is left is cut at the end of a sentence,
    and then has no end-of-document token.

    Args:
        sentence_ends: bool [V], true for ids whose text ends a sentence.
        seq_length: most tokens of a text.
        short_seq_prob: probability that a text has a random length between 32 and seq_length.
        non_sentence_start: probability that a document that is too long is cut anywhere, not before a sentence.
        one_document: whether a text holds one document only.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(
        self,
        documents: Documents,
        special: SpecialTokens,
        sentence_ends: NDArray[np.bool_],
        *,
        seq_length: int,
        short_seq_prob: float = 0.0,
        non_sentence_start: float = 0.0,
        one_document: bool = False,
    ) -> None:
        self.documents = documents
        self.cumulative = np.cumsum(documents.sizes, dtype=np.int64)  # [D]
        if len(documents) == 0 or self.cumulative[-1] == 0:
            raise UserError("the data has no tokens: every document is empty")
        assert special.cls is not None
        self.kernel = TextPacker(
            documents,
            self.cumulative,
            sentence_ends,
            special.eos,
            special.cls,
            seq_length,
            short_seq_prob,
            non_sentence_start,
            one_document,
        )

    @property
    def total_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.cumulative[-1])

    def first_document_sizes(self, seed: int, epoch: int, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The lengths of the documents that the samples of the given numbers draw first, int64 [N]."""
        tokens = (hash_uniform(seed, epoch, indices) * self.cumulative[-1]).astype(np.int64)
        numbers = np.searchsorted(self.cumulative, tokens, side="right")
        return np.asarray(self.documents.sizes)[numbers].astype(np.int64)


def sentence_end_ids(tokenizer: Tokenizer) -> NDArray[np.bool_]:
    """For each id, bool [V], whether its text ends an English or Chinese sentence.

    The text ends with one of `. ? ! ; : … 。 ？ ！ ； ：`, closing quotes and brackets aside, or has a line end.
    """
    ends = np.array([ends_sentence(tokenizer.decode([token])) for token in range(tokenizer.vocab_size)])
    ends[[command for command in tokenizer.special.roles.values() if command < len(ends)]] = False
    return ends


def ends_sentence(text: str) -> bool:
    """Whether a token of this text ends a sentence."""
    if "\n" in text:
        return True
    kept = text.rstrip(_CLOSING_CHARACTERS)
    return bool(kept) and kept[-1] in SENTENCE_END_CHARACTERS
