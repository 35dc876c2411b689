"""The task of span corruption (Raffel et al. 2020, T5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftk.config.options import option
from ftk.data.corpora.documents import Documents
from ftk.registry import register_task
from ftk.tasks.encoder_decoder import EncoderDecoderTask, decoder_start_option, required_id
from ftk.tasks.language_model import seq_length_option, vocabulary_divisor
from ftk.tasks.span_corruption.samples import SENTINEL, Counts, SpanCorruptionDataset, sentinels_of, text_length

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer


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


@register_task("span_corruption", config=SpanCorruptionConfig, criterion="cross_entropy")
class SpanCorruptionTask(EncoderDecoderTask):
    """The hidden spans of a text, one after the other, each behind the sentinel that stands for it in the text."""

    config: SpanCorruptionConfig
    special_tokens = "with_sentinels"

    def make_samples(self, documents: Documents, seed: int) -> SpanCorruptionDataset:
        start, end, pad = (
            required_id(self.tokenizer, role, "span_corruption") for role in (self.config.decoder_start, "eos", "pad")
        )
        sentinels = sentinels_of(self.tokenizer)
        before = self.tokenizer.prompt_prefix
        return SpanCorruptionDataset(
            documents, self.tokenizer.vocab_size, sentinels, start, end, pad, self.config, seed, before
        )

    @classmethod
    def in_answers(cls, tokenizer: Tokenizer) -> list[int]:
        return [token.id for token in tokenizer.command_tokens if SENTINEL.fullmatch(token.text)]

    @classmethod
    def target_begins(cls, tokenizer: Tokenizer) -> list[int]:
        return []

    @classmethod
    def longest(cls, config: SpanCorruptionConfig) -> tuple[int, int]:
        counts = _counts(config)[1]
        return int(counts.source), int(counts.target)

    def describe(self) -> Iterator[str]:
        yield from super().describe()
        num_before = len(self.tokenizer.prompt_prefix)
        length, counts = _counts(self.config, num_before)
        yield (
            f"span corruption: {counts.hidden} of {length} tokens in {counts.spans} spans; the encoder reads "
            f"{counts.source + num_before} tokens, the decoder {counts.target}"
        )


def _counts(config: SpanCorruptionConfig, num_before: int = 0) -> tuple[int, Counts]:
    """The length of a whole text, and how it is cut."""
    shape = config.noise_density, config.mean_span_length
    length = text_length(config.seq_length, *shape, num_before)
    return length, Counts.of(np.array(length), *shape)
