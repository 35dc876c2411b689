"""Options and samples of masked language modeling: pieces of a corpus, or pairs of them, with tokens hidden."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.batches.collate import SampleBatch, padded
from ftk.data.corpora.documents import Documents
from ftk.data.indexed.file_map import check_files
from ftk.data.random import SampleRandom
from ftk.data.sample_dataset import BatchedDataset
from ftk.errors import UserError
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor
from ftk.tasks.masked_lm._masks import hide
from ftk.tasks.pieces import Pieces, Tokens

_MASKS = 0x6D61736B  # keeps the random numbers of the masks apart from those of the texts


@dataclass(kw_only=True)
class MaskedLMConfig:
    seq_length: int = seq_length_option(512, "length of a sample, the tokens at its beginning and end counted", min=4)
    mask_prob: float = option(0.15, "share of the tokens that are hidden", "(0, 1)")
    leave_unmasked_prob: float = option(0.1, "share of the masked tokens that stay as they are", "[0, 1]")
    random_token_prob: float = option(0.1, "share of the masked tokens that become random ones", "[0, 1]")
    mask_whole_words: bool = option(False, "hide all pieces of a word, or none")
    mask_copies: int = option(
        0, "repeat the same samples and masks every N epochs (BERT: 10); 0: each epoch has its own", min=0, max=10**6
    )
    pairs: bool = option(
        False,
        "samples are two parts, and the model learns whether the second follows the first, as in BERT: one "
        "half of the time it is from another document",
    )
    short_seq_prob: float = option(
        0.1, "share of the pairs that have a random shorter length", "[0, 1]", needs={"pairs": True}
    )
    make_vocab_size_divisible_by: int = vocabulary_divisor()

    def validate(self) -> Iterator[str]:
        if self.pairs and self.seq_length < 5:
            yield f"seq_length is {self.seq_length}; pairs need at least 5"
        if self.leave_unmasked_prob + self.random_token_prob > 1.0:
            yield "leave_unmasked_prob and random_token_prob are together above 1; lower one"


class Pairs:
    """Two parts of a document, or a part of one and a part of another, one half of the time each (Devlin et al. 2019).

    Raises:
        UserError: there is no document of two tokens.
    """

    def __init__(self, documents: Documents, tokens: Tokens, config: MaskedLMConfig, seed: int) -> None:
        self.documents, self.tokens, self.config, self.seed = documents, tokens, config, seed
        self.room = config.seq_length - 3
        document_sizes = np.asarray(documents.sizes, dtype=np.int64)
        self.used = np.flatnonzero(document_sizes >= 2)  # [D], numbers of the documents that can be parted
        if not len(self.used):
            raise UserError("`pairs`: the data has no document of two tokens")
        # Texts up to each of these documents, [D]; a rest of one token, which cannot be parted, is left out.
        self.ends = np.cumsum(np.maximum(1, (document_sizes[self.used] + self.room - 2) // self.room))

    def __len__(self) -> int:
        return int(self.ends[-1])

    def sizes(self) -> NDArray[np.int32]:
        """Tokens of each text at most, int32 [len]: a second part from elsewhere may fill the room that is left."""
        return np.full(len(self), self.config.seq_length, dtype=np.int32)

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        check_files(self.documents)

    def texts(self, epoch: int, indices: NDArray[np.integer]) -> SampleBatch:
        """Several pairs, see `text`."""
        found = [self.text(epoch, int(index)) for index in indices]
        return SampleBatch(padded(found, self.tokens.pad), np.array([len(sample["tokens"]) for sample in found]))

    def text(self, epoch: int, index: int) -> dict[str, NDArray]:
        """One pair: tokens, token_types int64 [T]; random_next int64, 1 if the second part is from elsewhere."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        random = SampleRandom(self.seed, epoch, index)
        place = int(np.searchsorted(self.ends, index, side="right"))
        document = int(self.used[place])
        start = self.room * (index - (int(self.ends[place - 1]) if place else 0))
        is_short = random.uniform() < self.config.short_seq_prob
        room = 2 + random.below(self.room - 1) if is_short else self.room
        text = self.documents[document][start : start + room]
        first = 1 + random.below(len(text) - 1)
        is_random = len(self.used) > 1 and random.uniform() < 0.5
        second = text[first:]
        if is_random:
            other = random.below(len(self.used) - 1)
            found = self.documents[int(self.used[other + (other >= place)])]
            begin = random.below(len(found))
            second = found[begin : begin + room - first]
        tokens, parts = self.tokens, (text[:first], second)
        return {
            "tokens": np.concatenate(([tokens.first], parts[0], [tokens.last], parts[1], [tokens.last])),
            "token_types": np.repeat([0, 1], [len(parts[0]) + 2, len(parts[1]) + 1]),
            "random_next": np.array(int(is_random)),
        }


class MaskedDataset(BatchedDataset):
    """Texts some of whose tokens are hidden, each a pure function of (seed, epoch, index).

    Raises:
        UserError: there is no text at all.
    """

    def __init__(self, documents: Documents, tokens: Tokens, config: MaskedLMConfig, seed: int) -> None:
        self.tokens, self.config, self.seed = tokens, config, seed
        self.texts: Pieces | Pairs
        if config.pairs:
            self.texts = Pairs(documents, tokens, config, seed)
        else:
            self.texts = Pieces(documents, tokens, config.seq_length, seed)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each sample at most, int32 [len]."""
        return self.texts.sizes()

    def samples(self, epoch: int, indices: NDArray[np.int64]) -> SampleBatch:
        """Several samples.

        Returns:
            tokens, targets int64 [T], loss_mask bool [T], lengths int64; of pairs token_types int64 [T] and
            random_next int64, too (`Pairs.text`).
        """
        config, tokens = self.config, self.tokens
        epoch = epoch % config.mask_copies if config.mask_copies else epoch
        texts = self.texts.texts(epoch, indices)
        arrays, lengths = texts.arrays, texts.lengths
        targets = arrays["tokens"].copy()
        hidden = hide(
            arrays["tokens"],
            lengths,
            self.seed + _MASKS,
            epoch,
            indices,
            config.mask_prob,
            math.ceil(config.mask_prob * config.seq_length),
            config.pairs,
            tokens.kind,
            config.leave_unmasked_prob,
            config.random_token_prob,
            tokens.mask,
            tokens.others,
        )
        return SampleBatch({**arrays, "targets": targets, "loss_mask": hidden, "lengths": lengths}, lengths)
