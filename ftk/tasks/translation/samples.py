"""Options and samples of translation: the pairs of a corpus."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.batches.collate import SampleBatch
from ftk.data.corpora.documents import Documents
from ftk.data.sample_dataset import BatchedDataset, check_indices
from ftk.errors import UserError
from ftk.tasks.encoder_decoder import decoder_start_option, paired_samples
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor
from ftk.tasks.translation._pairs import PairReader

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class TranslationConfig:
    seq_length: int = seq_length_option(1024, "most tokens of a source and of a target, the end counted", min=2)
    long_pairs: str = option(
        "drop",
        "pairs with a longer text are dropped, or their texts are cut; their number is logged",
        choices=("drop", "cut"),
    )
    source_prefix: str = option(
        "", "text in front of each source, e.g. 'translate English to German: ' for T5; generation puts it there, too"
    )
    decoder_start: str = decoder_start_option("eos")
    make_vocab_size_divisible_by: int = vocabulary_divisor()


class TranslationDataset(BatchedDataset):
    """Sources and targets; every epoch has the same ones.

    Args:
        documents: pairs, with `.sizes`: two texts each, both closed by an end token.
        vocab_sizes: of sources and of targets. Ids from there on in a document are an error.
        start: the token in front of what the decoder reads.
        ends: close sources and targets.
        pad: fills.
        prefixes: tokens in front of each source and of each target.

    Raises:
        UserError: a document is no pair, or none is left.
    """

    def __init__(
        self,
        documents: Documents,
        vocab_sizes: tuple[int, int],
        start: int,
        ends: tuple[int, int],
        pad: int,
        prefixes: tuple[Sequence[int], Sequence[int]],
        config: TranslationConfig,
    ) -> None:
        self.texts, self.start, self.pad = documents, start, pad
        sizes = np.asarray(documents.sizes, dtype=np.int64)
        if not sizes.sum():
            raise UserError("the data has no pairs")
        self.reader = PairReader(documents, np.cumsum(sizes), vocab_sizes[1], ends[1], vocab_sizes[0], ends[0])
        self.source_sizes = self.reader.source_sizes()
        self.source_prefix, self.target_prefix = (np.array(prefix, dtype=np.int64) for prefix in prefixes)
        source_lengths = self.source_sizes.astype(np.int64) + len(self.source_prefix)
        target_lengths = sizes - self.source_sizes + len(self.target_prefix)
        longest = np.maximum(source_lengths, target_lengths)
        self.numbers = _kept(longest, config)  # int64 [N], of documents
        self.source_lengths, self.target_lengths = (
            np.minimum(lengths[self.numbers], config.seq_length) for lengths in (source_lengths, target_lengths)
        )

    def __len__(self) -> int:
        return len(self.numbers)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens of each source or of its target, whichever is longer, int32 [len]."""
        return np.maximum(self.source_lengths, self.target_lengths).astype(np.int32)

    def samples(self, epoch: int, indices: NDArray[np.integer]) -> SampleBatch:
        """Several samples, see `paired_samples`."""
        check_indices(indices, len(self))
        source_lengths, target_lengths = self.source_lengths[indices], self.target_lengths[indices]
        sources, targets = self.reader.read(
            self.numbers[indices],
            self.source_sizes,
            self.source_prefix,
            self.target_prefix,
            source_lengths,
            target_lengths,
            self.pad,
        )
        return paired_samples(sources, source_lengths, targets, target_lengths, self.start, self.pad)


def _kept(longest: NDArray[np.int64], config: TranslationConfig) -> NDArray[np.int64]:
    """The numbers of the pairs that are used; says how many are too long."""
    fits = longest <= config.seq_length
    long = len(fits) - int(fits.sum())
    if not long:
        return np.arange(len(fits))
    what = f"{long} of {len(fits)} pairs have a text of more than `seq_length` {config.seq_length} tokens"
    if config.long_pairs == "cut":
        logger.info("%s; its end is cut off (`long_pairs` drop leaves such pairs out)", what)
        return np.arange(len(fits))
    if long == len(fits):
        raise UserError(f"{what}, and `long_pairs` drop leaves nothing; raise `seq_length` or cut them")
    logger.info("%s and are left out", what)
    return np.flatnonzero(fits)
