"""The task of causal language modeling (Radford et al. 2019), over packed documents."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ftk.data.corpora.documents import Documents
from ftk.errors import UserError
from ftk.models.config import ends_of
from ftk.registry import register_task
from ftk.tasks.base import Task
from ftk.tasks.causal_lm.samples import CausalDataset, CausalLMConfig
from ftk.tasks.language_model import check_positions, corpus_unigram

if TYPE_CHECKING:
    from ftk.generation.engine.continuation import Continuation
    from ftk.tokenizers.base import Tokenizer


@register_task("causal_lm", config=CausalLMConfig, criterion="cross_entropy")
class CausalLMTask(Task):
    """The next token, at every place."""

    config: CausalLMConfig
    special_tokens = "with_end"
    unigram = corpus_unigram

    def make_samples(self, documents: Documents, seed: int) -> CausalDataset:
        end = self.tokenizer.special.text_end
        if end is None:
            raise UserError(f"the tokenizer {self.tokenizer.name} has no end token, which closes documents")
        vocab_size = self.tokenizer.vocab_size
        return CausalDataset(documents, vocab_size, end, self.config, seed, self.tokenizer.prompt_prefix)

    @classmethod
    def around_text(cls, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
        return [*tokenizer.prompt_prefix], []

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> Continuation:
        from ftk.generation.engine.continuation import Continuation

        ends = ends_of(model_config, tokenizer.special.text_end)
        return Continuation(ends, begins=tokenizer.prompt_prefix).read_by(model_config)

    def complete_model_config(self, config: Any) -> Any:
        check_positions(config, self.config, self.config.seq_length)
        vocab_size = self.tokenizer.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        return dataclasses.replace(config, vocab_size=vocab_size)
