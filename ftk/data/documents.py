"""Packing documents: draws documents by their length and cuts them, at sentences, into one text of seq_length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ftk.data._documents import draw_document, sentence_start_after, sentence_start_before
from ftk.data.blank_config import BlankInfillingConfig
from ftk.data.random import SampleRandom, hash_uniform
from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tokenizers import SpecialTokens, Tokenizer

SENTENCE_END_CHARACTERS = ".?!;:\n。？！；：…"
_CLOSING_CHARACTERS = "\"'”’」』）)]》】 "
_LEAST_ROOM = 3  # [CLS], a token, end of document
_SHORTEST_CUT = 32


class Documents(Protocol):
    """Token ids by document: an IndexedDataset, or any sequence of arrays with their sizes."""

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
        self._documents = [np.asarray(document, dtype=np.int64) for document in documents]
        self.sizes = np.array([len(document) for document in self._documents], dtype=np.int32)

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        return self._documents[index]


class DocumentPacker:
    """Draws texts of at most seq_length tokens: [CLS], text, end of document, as many times as fit.

    Args:
        documents: the corpus.
        special: ids of the command tokens.
        config: seq_length, short_seq_prob, non_sentence_start, sample_one_document.
        sentence_ends: bool [V], true for ids whose text ends a sentence.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(
        self,
        documents: Documents,
        special: SpecialTokens,
        config: BlankInfillingConfig,
        sentence_ends: NDArray[np.bool_],
    ) -> None:
        self.documents = documents
        self.special = special
        self.config = config
        self.sentence_ends = np.ascontiguousarray(sentence_ends, dtype=np.uint8)
        self.cumulative = np.cumsum(documents.sizes, dtype=np.int64)  # [D]
        if len(documents) == 0 or self.cumulative[-1] == 0:
            raise UserError("the data has no tokens: every document is empty")

    @property
    def total_tokens(self) -> int:
        """Tokens of all documents."""
        return int(self.cumulative[-1])

    def first_document_sizes(self, seed: int, epoch: int, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The lengths of the documents that the samples of the given numbers draw first, int64 [N]."""
        tokens = (hash_uniform(seed, epoch, indices) * self.cumulative[-1]).astype(np.int64)
        numbers = np.searchsorted(self.cumulative, tokens, side="right")
        return np.asarray(self.documents.sizes)[numbers].astype(np.int64)

    def pack(self, rng: SampleRandom) -> NDArray[np.int64]:
        """One text.

        Documents are drawn in proportion to their length. One that is too long for an empty text starts at a
        random place, moved to the start of a sentence; one that is too long for the room that is left is cut
        at the end of a sentence, and then has no end-of-document token.

        Args:
            rng: the sample's random stream; it is advanced.

        Returns:
            int64 [N], N <= seq_length.
        """
        number = draw_document(self.cumulative, rng)
        room = self._draw_room(rng)
        text = np.empty(room, dtype=np.int64)
        used, whole = self._append(text, 0, self._without_end(number), rng)
        while whole and not self.config.sample_one_document and room - used >= _LEAST_ROOM:
            document = self._without_end(draw_document(self.cumulative, rng))
            used, whole = self._append(text, used, document, rng)
        return text[:used]

    def _draw_room(self, rng: SampleRandom) -> int:
        """seq_length, or a shorter length for the share of short samples."""
        seq_length = self.config.seq_length
        if self.config.short_seq_prob > 0.0 and rng.uniform() < self.config.short_seq_prob:
            shortest = min(_SHORTEST_CUT, seq_length // 2)
            return shortest + rng.below(seq_length - shortest)
        return seq_length

    def _without_end(self, number: int) -> NDArray[np.integer]:
        """A document without the end-of-document token that preprocessing may have stored with it."""
        document = self.documents[number]
        return document[:-1] if len(document) and document[-1] == self.special.eos else document

    def _append(
        self, text: NDArray[np.int64], used: int, document: NDArray[np.integer], rng: SampleRandom
    ) -> tuple[int, bool]:
        """Adds a document; returns the tokens used then, and whether the document's end was reached."""
        room = len(text) - used
        start = 0
        if used == 0 and len(document) + 2 > room:
            start = self._random_start(document, room, rng)
        assert self.special.cls is not None
        assert self.special.eos is not None
        text[used] = self.special.cls
        length = len(document) - start
        if length + 2 <= room:
            text[used + 1 : used + 1 + length] = document[start:]
            text[used + 1 + length] = self.special.eos
            return used + length + 2, True
        text[used + 1 :] = document[start : start + room - 1]
        end = sentence_start_before(text[used:], room, self.sentence_ends)
        return used + (end if end >= max(2, room // 2) else room), False

    def _random_start(self, document: NDArray[np.integer], room: int, rng: SampleRandom) -> int:
        """Where to cut a document that is too long: at random, so that even the last place fills the room.

        The place moves to the start of a sentence, the nearest before or the nearest after it, if there is one
        within half the room.
        """
        start = rng.below(len(document) + 2 - room + 1)
        if start == 0 or rng.uniform() < self.config.non_sentence_start:
            return start
        reach = room // 2
        first = max(0, start - reach)
        window = np.ascontiguousarray(document[first : start + reach + 1], dtype=np.int64)
        before = sentence_start_before(window, start - first, self.sentence_ends)
        if before < 0 and first == 0:
            before = 0
        after = sentence_start_after(window, start - first, self.sentence_ends)
        moved = (before, after) if rng.uniform() < 0.5 else (after, before)
        return first + next((place for place in moved if place >= 0), start - first)


def sentence_end_ids(tokenizer: Tokenizer, size: int | None = None) -> NDArray[np.bool_]:
    """For each id, whether its text ends an English or Chinese sentence.

    The text ends with one of `. ? ! ; : … 。 ？ ！ ； ：`, closing quotes and brackets aside, or has a line end.

    Args:
        tokenizer: the tokenizer of the data.
        size: number of ids; the tokenizer's vocabulary without padding by default.

    Returns:
        bool [size].
    """
    ends = np.zeros(tokenizer.vocab_size if size is None else size, dtype=np.bool_)
    for token in range(min(len(ends), tokenizer.vocab_size)):
        ends[token] = ends_sentence(tokenizer.decode([token]))
    commands = [value for value in vars(tokenizer.special).values() if isinstance(value, int)]
    ends[[command for command in commands if command < len(ends)]] = False
    return ends


def ends_sentence(text: str) -> bool:
    """Whether a token of this text ends a sentence."""
    if "\n" in text:
        return True
    kept = text.rstrip(_CLOSING_CHARACTERS)
    return bool(kept) and kept[-1] in SENTENCE_END_CHARACTERS
