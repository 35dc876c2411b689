"""GLM's task: autoregressive blank infilling (Du et al. 2022, section 2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.batch import Batch
from ftk.data.batches.collate import Collater
from ftk.data.corpora.documents import Documents
from ftk.errors import UserError
from ftk.registry import register_task
from ftk.tasks.base import Task
from ftk.tasks.glm_blank.config import BlankInfillingConfig
from ftk.tasks.glm_blank.infill.config import FillConfig
from ftk.tasks.glm_blank.samples.dataset import GLMBlankDataset
from ftk.tasks.glm_blank.samples.infilling import OBJECTIVES
from ftk.tasks.language_model import check_positions, corpus_unigram, vocabulary_divisor

if TYPE_CHECKING:
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.framing import BlankFraming
    from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class GLMBlankConfig(BlankInfillingConfig):
    make_vocab_size_divisible_by: int = vocabulary_divisor()


@register_task("glm_blank", config=GLMBlankConfig, criterion="cross_entropy")
class GLMBlankTask(Task):
    """Spans of a text are blanked out and generated, autoregressively, after the text."""

    config: GLMBlankConfig
    special_tokens = "glm"
    generation_config = FillConfig
    unigram = corpus_unigram

    @classmethod
    def loss_share(cls, config: GLMBlankConfig) -> float:
        return 0.18  # of the samples of the usual options, with their blanks and end tokens

    def make_samples(self, documents: Documents, seed: int) -> GLMBlankDataset:
        return GLMBlankDataset(documents, self.tokenizer, self.config, seed)

    def collater(self) -> Callable[[Sequence[dict[str, Any]]], Batch]:
        return Collater(self.tokenizer.special, groups={"objective": OBJECTIVES})

    def complete_model_config(self, config: Any) -> Any:
        vocab_size = self.tokenizer.padded_vocab_size(self.config.make_vocab_size_divisible_by)
        # Numbered blanks put their answers at the position seq_length; the tables have a row for it, one more than
        # max_positions, only where there are block positions.
        needed = self.config.seq_length + (self.config.sentinel_tokens and not self.config.block_positions)
        check_positions(config, self.config, needed)
        positions = {"block_positions": self.config.block_positions, "gmask_runs_on": self.config.gmask_runs_on}
        if not hasattr(config, "gmask_runs_on") and positions.pop("gmask_runs_on"):
            raise UserError("`gmask_runs_on` is for models with rotary positions, such as chatglm; leave it out")
        return dataclasses.replace(config, vocab_size=vocab_size, **positions)

    def show(self, split: str, *, page: str | None, width: int, num_samples: int | None, **which: Any) -> str:
        if not hasattr(self.corpus, "documents"):
            return super().show(split, page=page, width=width, num_samples=num_samples, **which)
        from ftk.tasks.glm_blank.samples.show import samples_to_show, show
        from ftk.tasks.glm_blank.samples.show_html import show_html

        documents = self.corpus.documents(split)
        if page is None:
            return show(documents, self.tokenizer, self.config, width=width, num_samples=num_samples or 1, **which)
        samples = samples_to_show(documents, self.tokenizer, self.config, num_samples=num_samples or 3, **which)
        return show_html(list(samples), self.tokenizer, page)

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> BlankFraming:
        from ftk.tasks.glm_blank.infill.framing import BlankFraming

        return BlankFraming(tokenizer.special, model_config)

    @classmethod
    def text_generator(cls) -> type[BlankFiller]:
        from ftk.tasks.glm_blank.infill.fill import BlankFiller

        return BlankFiller
