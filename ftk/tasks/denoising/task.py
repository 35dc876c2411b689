"""The task of denoising (Lewis et al. 2020, BART)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ftk.config.options import option
from ftk.data.corpora.documents import Documents, sentence_end_ids
from ftk.registry import register_task
from ftk.tasks.denoising.samples import DenoisingDataset, source_bound
from ftk.tasks.encoder_decoder import EncoderDecoderTask, decoder_start_option, required_id
from ftk.tasks.language_model import corpus_unigram, seq_length_option, vocabulary_divisor
from ftk.tasks.pieces import Tokens, special_ids

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer


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
