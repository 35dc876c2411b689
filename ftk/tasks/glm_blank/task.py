"""GLM's task: autoregressive blank infilling (Du et al. 2022, section 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ftk.batch import Batch
from ftk.data.batches.collate import Collater
from ftk.data.corpora.documents import Documents
from ftk.errors import UserError
from ftk.registry import register_task
from ftk.tasks.base import Task, corpus_unigram
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES

if TYPE_CHECKING:
    from ftk.evaluation.unigram import Unigram
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.framing import BlankFraming
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class GLMBlankConfig(BlankInfillingConfig):
    make_vocab_size_divisible_by: int = field(
        default=128,
        metadata={
            "max": 10**6,
            "help": "the vocabulary is padded to a multiple of this, so that matrix sizes are round",
            "unit": "tokens",
        },
    )

    def validate(self) -> Iterator[str]:
        yield from super().validate()
        if self.make_vocab_size_divisible_by < 1:
            yield f"make_vocab_size_divisible_by is {self.make_vocab_size_divisible_by}; it must be at least 1"


@register_task("glm_blank", config=GLMBlankConfig, criterion="cross_entropy")
class GLMBlankTask(Task):
    """Spans of a text are blanked out and generated, autoregressively, after the text."""

    config: GLMBlankConfig

    def make_samples(self, documents: Documents, seed: int) -> GLMBlankDataset:
        return GLMBlankDataset(documents, self.tokenizer, self.config, seed, getattr(self.corpus, "index_cache", None))

    def collater(self) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        return Collater(self.tokenizer.special, groups={"objective": OBJECTIVES})

    def complete_model_config(self, config: Any) -> Any:
        vocab_size = self.tokenizer.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        # Numbered blanks put their answers at the position seq_length; the tables have a row for it, one more than
        # max_positions, only where there are block positions.
        needed = self.config.seq_length + (self.config.sentinel_tokens and not self.config.block_positions)
        if needed > config.max_positions:
            raise UserError(
                f"`seq_length` {self.config.seq_length} is beyond the model's {config.max_positions} positions; "
                f"lower `seq_length` or raise `max_positions`"
            )
        return dataclasses.replace(config, vocab_size=vocab_size, block_positions=self.config.block_positions)

    def show(self, split: str, *, page: str | None, width: int, num_samples: int | None, **which: Any) -> str:
        from ftk.tasks.glm_blank.samples.show import samples_to_show, show
        from ftk.tasks.glm_blank.samples.show_html import show_html

        documents = self.corpus.documents(split)
        if page is None:
            return show(documents, self.tokenizer, self.config, width=width, num_samples=num_samples or 1, **which)
        samples = samples_to_show(documents, self.tokenizer, self.config, num_samples=num_samples or 3, **which)
        return show_html(list(samples), self.tokenizer, page)

    def unigram(self, split: str) -> Unigram:
        return corpus_unigram(self, split)

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> BlankFraming:
        from ftk.tasks.glm_blank.infill.framing import BlankFraming

        return BlankFraming(tokenizer.special, model_config)

    @classmethod
    def text_generator(cls) -> type[BlankFiller]:
        from ftk.tasks.glm_blank.infill.fill import BlankFiller

        return BlankFiller
