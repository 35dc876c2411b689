"""The task of span corruption (Raffel et al. 2020, T5)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from ftk.data.corpora.documents import Documents
from ftk.registry import register_task
from ftk.tasks.encoder_decoder import EncoderDecoderTask, required_id
from ftk.tasks.span_corruption.samples import (
    SENTINEL,
    Counts,
    SpanCorruptionConfig,
    SpanCorruptionDataset,
    sentinels_of,
    text_length,
)

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer


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
