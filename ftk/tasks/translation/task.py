"""The task of translation, and of any other text that is written for a text: a summary, an answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftk.data.corpora.documents import Documents
from ftk.registry import register_task
from ftk.tasks.encoder_decoder import EncoderDecoderTask, decoder_start_option, required_id
from ftk.tasks.language_model import vocabulary_divisor
from ftk.tasks.translation.samples import TranslationDataset

if TYPE_CHECKING:
    from ftk.generation.engine.source_to_target import SourceToTarget
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class TranslationConfig:
    seq_length: int = field(
        default=1024,
        metadata={
            "daily": True,
            "min": 2,
            "max": 10**8,
            "help": "most tokens of a source and of a target, the end counted",
            "unit": "tokens",
        },
    )
    long_pairs: str = field(
        default="drop",
        metadata={
            "help": "pairs with a longer text are dropped, or their texts are cut; their number is logged",
            "choices": ("drop", "cut"),
        },
    )
    source_prefix: str = field(
        default="",
        metadata={
            "help": "text in front of each source, e.g. 'translate English to German: ' for T5; generation puts it "
            "there, too"
        },
    )
    decoder_start: str = decoder_start_option("eos")
    make_vocab_size_divisible_by: int = vocabulary_divisor()


@register_task("translation", config=TranslationConfig, criterion="cross_entropy")
class TranslationTask(EncoderDecoderTask):
    """The target of each source."""

    config: TranslationConfig
    special_tokens = "with_end"

    def make_samples(self, documents: Documents, seed: int) -> TranslationDataset:
        tokenizer = self.tokenizer
        start, end = (required_id(tokenizer, role, "translation") for role in (self.config.decoder_start, "eos"))
        prefixes = _before_source(tokenizer, self.config), [*tokenizer.prompt_prefix]
        pad = 0 if tokenizer.special.pad is None else tokenizer.special.pad
        return TranslationDataset(documents, tokenizer.vocab_size, start, end, pad, prefixes, self.config)

    @classmethod
    def framing_as_trained(cls, tokenizer: Tokenizer, model_config: Any, options: Any) -> SourceToTarget:
        framing = cls.framing(tokenizer, model_config)
        framing.around = _before_source(tokenizer, options), framing.around[1]
        return framing

    def longest(self) -> tuple[int, int]:
        return self.config.seq_length, self.config.seq_length


def _before_source(tokenizer: Tokenizer, config: TranslationConfig) -> list[int]:
    """Tokens in front of the text of a source: the prefix is encoded by itself, as each text is."""
    return [*tokenizer.prompt_prefix, *tokenizer.encode(config.source_prefix)]
