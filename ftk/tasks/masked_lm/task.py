"""The task of masked language modeling: as RoBERTa (Liu et al. 2019), or over pairs as BERT (Devlin et al. 2019)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.batch import Batch
from ftk.config.options import option
from ftk.data.batches.collate import Collater, dense_batch
from ftk.data.corpora.documents import Documents
from ftk.errors import UserError
from ftk.generation.config_groups import MOST_ANSWERS
from ftk.generation.one_pass import NoProcessors, OnePassConfig
from ftk.registry import register_task
from ftk.tasks.base import Task
from ftk.tasks.language_model import check_positions, corpus_unigram
from ftk.tasks.masked_lm.samples import MaskedDataset, MaskedLMConfig
from ftk.tasks.pieces import Tokens, special_ids
from ftk.tokenizers.base import Tokenizer

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ftk.tasks.masked_lm.fill import MaskFiller


@dataclass(kw_only=True)
class MaskFillConfig(OnePassConfig):
    """How masks are filled. There is no search: each becomes its likeliest token."""

    does: ClassVar[str] = "fills masks in a text and gives no probability of one"

    alternatives: int = option(
        5,
        "give this many likeliest tokens for each mask, with their probabilities",
        daily=True,
        unit="tokens",
        min=0,
        max=MOST_ANSWERS,
    )


@register_task("masked_lm", config=MaskedLMConfig, criterion="masked_lm")
class MaskedLMTask(Task):
    """The masked tokens of a text, from all others."""

    config: MaskedLMConfig
    special_tokens = "with_mask"
    generation_config = MaskFillConfig
    processor_config = NoProcessors
    unigram = corpus_unigram

    @classmethod
    def loss_share(cls, config: MaskedLMConfig) -> float:
        return config.mask_prob

    def make_samples(self, documents: Documents, seed: int) -> MaskedDataset:
        tokens = Tokens.of(
            self.tokenizer, "masked_lm", whole_words=self.config.mask_whole_words, spares_ends=self.config.pairs
        )
        return MaskedDataset(documents, tokens, self.config, seed)

    @classmethod
    def around_text(cls, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        first, last, _, _ = special_ids(tokenizer, "masked_lm")
        return [first], [last]

    def collater(self) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        return MaskedCollater(self.tokenizer.special)

    @classmethod
    def text_generator(cls) -> type[MaskFiller]:
        from ftk.tasks.masked_lm.fill import MaskFiller

        return MaskFiller

    def complete_model_config(self, config: Any) -> Any:
        if self.config.pairs:
            if getattr(config, "type_vocab_size", 2) < 2:
                raise UserError(
                    f"`pairs` needs two token types, and the model has {config.type_vocab_size}; raise "
                    f"`type_vocab_size`, or leave out `pairs`"
                )
            if not hasattr(config, "next_sentence"):
                raise UserError("`pairs` needs a model with a next-sentence output, such as bert; leave it out")
            config = dataclasses.replace(config, next_sentence=True)
        check_positions(config, self.config, self.config.seq_length)
        vocab_size = self.tokenizer.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        # A family that numbers its positions by padding (RoBERTa) has to know which token that is.
        pad = {"pad_token": self.tokenizer.special.pad} if getattr(config, "pad_token", None) is not None else {}
        return dataclasses.replace(config, vocab_size=vocab_size, **pad)


class MaskedCollater(Collater):
    """Adds the places of the first tokens, where pairs are scored, behind those of the masked ones."""

    def __call__(self, samples: Sequence[dict[str, NDArray]]) -> Batch:
        import torch

        arrays = dict(self.arrays(samples))
        random_next = arrays.pop("random_next", None)
        batch = dense_batch(arrays)
        if random_next is None:
            return batch
        rows, num_tokens = arrays["tokens"].shape
        places = torch.cat((batch.places, torch.arange(rows) * num_tokens))
        weights = torch.from_numpy(arrays["loss_mask"].sum(axis=1)).float()
        extras = {"random_next": torch.from_numpy(random_next), "pair_weights": weights}
        return dataclasses.replace(batch, places=places, extras=extras)
