"""The task of translation, and of any other text that is written for a text: a summary, an answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ftk.data.batches.collate import Collater
from ftk.data.corpora.documents import Documents
from ftk.errors import UserError
from ftk.registry import register_task
from ftk.tasks.encoder_decoder import EncoderDecoderTask, required_id
from ftk.tasks.translation.samples import TranslationConfig, TranslationDataset
from ftk.tokenizers import SpecialTokens

if TYPE_CHECKING:
    from ftk.generation.engine.source_to_target import SourceToTarget
    from ftk.tokenizers.base import Tokenizer


@register_task("translation", config=TranslationConfig, criterion="cross_entropy")
class TranslationTask(EncoderDecoderTask):
    """The target of each source."""

    config: TranslationConfig
    special_tokens = "with_end"
    takes_source = True

    def make_samples(self, documents: Documents, seed: int) -> TranslationDataset:
        tokenizer, source = self.tokenizer, self.tokenizer.of_source
        start = required_id(tokenizer, self.config.decoder_start, "translation")
        ends = required_id(source, "eos", "translation"), required_id(tokenizer, "eos", "translation")
        prefixes = _before_source(source, self.config), [*tokenizer.prompt_prefix]
        sizes = source.vocab_size, tokenizer.vocab_size
        return TranslationDataset(documents, sizes, start, ends, self._padding, prefixes, self.config)

    def collater(self) -> Collater:
        return Collater(SpecialTokens(pad=self._padding))

    def complete_model_config(self, config: Any) -> Any:
        config, source = super().complete_model_config(config), self.tokenizer.source
        size = getattr(config, "source_vocab_size", None)
        if source is None:
            if size is not None:
                raise UserError(
                    f"the model reads a vocabulary of {size} tokens and writes one of {config.vocab_size}, but the "
                    "data has one tokenizer; preprocess with `source_tokenizer_path`"
                )
            return config
        if not hasattr(config, "source_vocab_size"):
            raise UserError(
                "the data has a tokenizer of its own for sources, but the model has one vocabulary; train `arch` "
                "transformer_tiny or another fairseq's, or preprocess with one tokenizer for both sides"
            )
        if config.share_embeddings == "all":
            raise UserError(
                "the data has a tokenizer of its own for sources, which cannot share all embeddings; give "
                "`share_embeddings` decoder"
            )
        size = source.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        return dataclasses.replace(config, source_vocab_size=size)

    @classmethod
    def framing_as_trained(cls, tokenizer: Tokenizer, model_config: Any, options: Any) -> SourceToTarget:
        framing = cls.framing(tokenizer, model_config)
        framing.around = _before_source(tokenizer.of_source, options), framing.around[1]
        return framing

    @classmethod
    def longest(cls, config: TranslationConfig) -> tuple[int, int]:
        return config.seq_length, config.seq_length

    @property
    def _padding(self) -> int:
        """Fills sources and targets: a token of both vocabularies."""
        pads = {each.special.pad for each in (self.tokenizer, self.tokenizer.of_source)}
        pad = pads.pop()
        return 0 if pads or pad is None else pad


def _before_source(tokenizer: Tokenizer, config: TranslationConfig) -> list[int]:
    """Tokens in front of the text of a source: the prefix is encoded by itself, as each text is."""
    return [*tokenizer.prompt_prefix, *tokenizer.encode(config.source_prefix)]
