"""Options and samples of span corruption: texts of one length, of which some spans are hidden and asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option
from ftk.data.batches.collate import SampleBatch
from ftk.data.corpora.documents import Documents
from ftk.data.corpora.ring import TokenRing
from ftk.data.sample_dataset import BatchedDataset
from ftk.errors import UserError
from ftk.tasks.encoder_decoder import decoder_start_option, paired_samples
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor
from ftk.tasks.span_corruption._spans import corrupt

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

_SPANS = 0x7370616E  # keeps the random numbers of the spans apart from those of the texts
SENTINEL = re.compile(r"▁?<extra_id_(\d+)>")  # mT5's are pieces of its vocabulary


@dataclass(kw_only=True)
class SpanCorruptionConfig:
    seq_length: int = seq_length_option(
        512,
        "what the encoder reads of a sample, sentinels and the end counted; the text is longer by what is hidden",
        min=4,
    )
    noise_density: float = option(0.15, "share of the tokens that are hidden", "(0, 1)")
    mean_span_length: float = option(3.0, "mean length of the spans that are hidden", "[1, inf)", unit="tokens")
    decoder_start: str = decoder_start_option("pad")
    make_vocab_size_divisible_by: int = vocabulary_divisor()


class Counts(NamedTuple):
    """How texts are cut (Raffel et al. 2020; as their code has it, which closes no target with one more sentinel).

    Attributes:
        hidden: tokens of a text that are hidden, int64 [...].
        spans: in how many runs, int64 [...].
        source, target: tokens of the encoder and of the decoder, a sentinel for each span and the end counted.
    """

    hidden: NDArray[np.int64]
    spans: NDArray[np.int64]
    source: NDArray[np.int64]
    target: NDArray[np.int64]

    @classmethod
    def of(cls, lengths: NDArray[np.integer], density: float, mean: float) -> Counts:
        """Those of texts of some lengths, [...]; `round` is half to even."""
        lengths = np.asarray(lengths, dtype=np.int64)
        hidden = np.rint(lengths * density).astype(np.int64)
        hidden = np.maximum(np.minimum(np.maximum(hidden, 1), lengths - 1), 0)
        spans = np.maximum(np.rint(hidden / mean).astype(np.int64), 1)
        spans = np.minimum(spans, np.minimum(hidden, lengths - hidden))
        return cls(hidden, spans, lengths - hidden + spans + 1, hidden + spans + 1)


def text_length(seq_length: int, density: float, mean: float, num_before: int = 0) -> int:
    """The most tokens of a text that the encoder reads as `seq_length` tokens or fewer.

    With `num_before` tokens in front it reads no more than it does without them.
    """
    if num_before:
        without = text_length(seq_length, density, mean)
        seq_length = int(Counts.of(np.array(without), density, mean).source) - num_before
    low, high = 1, 2
    while Counts.of(np.array(high), density, mean).source <= seq_length:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = Counts.of(np.array(middle), density, mean).source <= seq_length
        low, high = (middle, high) if fits else (low, middle)
    return low


def sentinels_of(tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The ids of `<extra_id_0>`, `<extra_id_1>`, ..., int64 [K].

    Raises:
        UserError: the tokenizer has none.
    """
    texts = [(token.text, token.id) for token in tokenizer.command_tokens]
    found = _numbered(texts) or _numbered((tokenizer.token_text(id_), id_) for id_ in range(tokenizer.vocab_size))
    ids: list[int] = []
    while len(ids) in found:
        ids.append(found[len(ids)])
    if not ids:
        raise UserError(
            f"the tokenizer {tokenizer.name} has no sentinels (<extra_id_0>, <extra_id_1> ...), which span_corruption "
            f"needs; preprocess with `special_tokens` with_sentinels, or with a tokenizer that has them, as T5's"
        )
    return np.array(ids, dtype=np.int64)


def _numbered(texts: Iterable[tuple[str, int]]) -> dict[int, int]:
    matches = ((SENTINEL.fullmatch(text), id_) for text, id_ in texts)
    return {int(match[1]): id_ for match, id_ in matches if match is not None}


class SpanCorruptionDataset(BatchedDataset):
    """Texts with hidden spans, each a pure function of (seed, epoch, index).

    Args:
        vocab_size: V. Other ids than 0 .. V - 1 in a document are an error.
        sentinels: int64 [K], the tokens that stand for the spans.
        start: the token in front of what the decoder reads.
        end: closes documents, sources and targets.
        pad: fills.
        before: ids in front of each source, where the tokenizer wants some: none of T5's, [CLS] of BERT's.

    Raises:
        UserError: there is no token at all, or there are fewer sentinels than spans.
    """

    def __init__(
        self,
        documents: Documents,
        vocab_size: int,
        sentinels: NDArray[np.int64],
        start: int,
        end: int,
        pad: int,
        config: SpanCorruptionConfig,
        seed: int,
        before: Sequence[int] = (),
    ) -> None:
        self.sentinels, self.start, self.end, self.pad = sentinels, start, end, pad
        self.config, self.seed, self.before = config, seed, list(before)
        length = text_length(config.seq_length, config.noise_density, config.mean_span_length, len(self.before))
        spans = int(self.counts(np.array(length)).spans)
        if spans > len(sentinels):
            raise UserError(
                f"`seq_length` {config.seq_length} gives {spans} spans, but the tokenizer has {len(sentinels)} "
                f"sentinels; lower `seq_length` or `noise_density`, or raise `mean_span_length`"
            )
        self.texts = TokenRing(documents, vocab_size, length, end, (), seed)

    def counts(self, lengths: NDArray[np.integer]) -> Counts:
        """How texts of some lengths are cut."""
        return Counts.of(lengths, self.config.noise_density, self.config.mean_span_length)

    def sizes(self, epoch: int) -> NDArray[np.int32]:
        """Tokens that the encoder reads of each sample, or the decoder if it reads more, int32 [len]."""
        counts = self.counts(self.texts.sizes())
        return np.maximum(counts.source + len(self.before), counts.target).astype(np.int32)

    def samples(self, epoch: int, indices: NDArray[np.integer]) -> SampleBatch:
        """Several samples, see `paired_samples`."""
        texts, _, lengths = self.texts.pieces(epoch, indices, self.pad)
        counts = self.counts(lengths)
        sources, targets = corrupt(
            texts,
            lengths,
            counts.hidden,
            counts.spans,
            self.seed + _SPANS,
            epoch,
            indices,
            self.sentinels,
            self.end,
            self.pad,
        )
        before = np.tile(np.array(self.before, dtype=np.int64), (len(sources), 1))
        sources = np.concatenate((before, sources), axis=1)
        return paired_samples(sources, counts.source + len(self.before), targets, counts.target, self.start, self.pad)
