"""The task of denoising (Lewis et al. 2020, BART)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ftk.data.corpora.documents import Documents, sentence_end_ids
from ftk.registry import register_task
from ftk.tasks.denoising.samples import DenoisingConfig, DenoisingDataset, source_bound
from ftk.tasks.encoder_decoder import EncoderDecoderTask, required_id
from ftk.tasks.language_model import corpus_unigram
from ftk.tasks.pieces import Tokens, special_ids

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer


@register_task("denoising", config=DenoisingConfig, criterion="cross_entropy")
class DenoisingTask(EncoderDecoderTask):
    """A text as it was, from the text with its sentences permuted and spans of it hidden."""

    config: DenoisingConfig
    special_tokens = "with_mask"
    unigram = corpus_unigram

    def make_samples(self, documents: Documents, seed: int) -> DenoisingDataset:
        tokens = Tokens.of(self.tokenizer, "denoising", whole_words=self.config.mask_length != "subword")
        start = required_id(self.tokenizer, self.config.decoder_start, "`decoder_start`")
        return DenoisingDataset(documents, tokens, sentence_end_ids(self.tokenizer), start, self.config, seed)

    @classmethod
    def around_text(cls, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        first, last, _, _ = special_ids(tokenizer, "denoising")
        return [first], [last]

    @classmethod
    def target_begins(cls, tokenizer: Tokenizer) -> list[int]:
        return cls.around_text(tokenizer)[0]

    @classmethod
    def longest(cls, config: DenoisingConfig) -> tuple[int, int]:
        length = config.seq_length
        return int(source_bound(np.array(length), config.insert)), length
