"""Options and samples of denoising: pieces of a corpus, with noise for the encoder and as they were for the decoder."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.batches.collate import SampleBatch
from ftk.data.corpora.documents import Documents
from ftk.data.sample_dataset import BatchedDataset
from ftk.tasks.denoising._noise import corrupt
from ftk.tasks.encoder_decoder import decoder_start_option, paired_samples
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor
from ftk.tasks.pieces import Pieces, Tokens

_NOISE = 0x6E6F6973  # keeps the random numbers of the noise apart from those of the texts


@dataclass(kw_only=True)
class DenoisingConfig:
    seq_length: int = seq_length_option(512, "length of a text, the tokens at its beginning and end counted", min=3)
    mask_ratio: float = option(0.3, "share of the words that are hidden", "[0, 1]")
    mask_length: str = option(
        "span-poisson",
        "what is hidden at once: a token, a word, or a span of words of a random length",
        choices=("subword", "word", "span-poisson"),
    )
    poisson_lambda: float = option(
        3.0,
        "mean length of the spans; one of no words is a mask that is inserted",
        "[0.1, 100]",
        needs={"mask_length": "span-poisson"},
        unit="words",
    )
    replace_length: int = option(1, "masks for a span; -1: one for each of its tokens", choices=(-1, 0, 1))
    mask_random: float = option(0.0, "share of the masks that become random tokens", "[0, 1]")
    permute_sentences: float = option(1.0, "share of a text's sentences that change places", "[0, 1]")
    insert: float = option(0.0, "insert this many masks besides, as a share of the tokens", "[0, 1]")
    rotate: float = option(0.0, "share of the texts that begin at a random place", "[0, 1]")
    decoder_start: str = decoder_start_option("eos")
    make_vocab_size_divisible_by: int = vocabulary_divisor()


def span_lengths(mean: float) -> NDArray[np.float64]:
    """How likely a span has at most 0, 1, 2, ... words: Poisson's distribution, float64 [K]."""
    counts = np.arange(256)
    logs = counts * math.log(mean) - np.cumsum(np.log(np.maximum(counts, 1)))
    cumulative = np.cumsum(np.exp(logs - mean))
    return cumulative / cumulative[-1]


def source_bound(lengths: NDArray[np.integer], inserted: float) -> NDArray[np.int64]:
    """The most tokens of texts with noise, of as many tokens without, [...]."""
    lengths = np.asarray(lengths, dtype=np.int64)
    return lengths + np.ceil(inserted * lengths).astype(np.int64)


class DenoisingDataset(BatchedDataset):
    """Texts and the same texts with noise, each a pure function of (seed, epoch, index).

    Args:
        sentence_ends: bool [V], the tokens that end a sentence.
        start: the token in front of what the decoder reads.

    Raises:
        UserError: there is no token at all.
    """

    def __init__(
        self,
        documents: Documents,
        tokens: Tokens,
        sentence_ends: NDArray[np.bool_],
        start: int,
        config: DenoisingConfig,
        seed: int,
    ) -> None:
        self.texts = Pieces(documents, tokens, config.seq_length, seed)
        self.tokens, self.start, self.config, self.seed = tokens, start, config, seed
        self.sentence_ends = sentence_ends.astype(np.uint8)
        self.sentence_ends[tokens.last] = 1  # a document's end, too
        in_spans = config.mask_length == "span-poisson"
        self.span_lengths = span_lengths(config.poisson_lambda) if in_spans else np.empty(0)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens that the encoder or the decoder reads of each sample at most, int32 [len]."""
        return source_bound(self.texts.sizes(), self.config.insert).astype(np.int32)

    def samples(self, epoch: int, indices: NDArray[np.int64]) -> SampleBatch:
        """Several samples, see `paired_samples`."""
        config, tokens = self.config, self.tokens
        texts = self.texts.texts(epoch, indices)
        whole = texts.arrays["tokens"]
        sources, lengths = corrupt(
            whole,
            texts.lengths,
            self.seed + _NOISE,
            epoch,
            indices,
            tokens.kind,
            self.sentence_ends,
            config.permute_sentences,
            config.mask_ratio,
            self.span_lengths,
            config.replace_length,
            config.mask_random,
            config.insert,
            config.rotate,
            tokens.mask,
            tokens.others,
            tokens.pad,
        )
        return paired_samples(sources, lengths, whole, texts.lengths, self.start, tokens.pad)
