"""The task preference: of two answers to the same question, a model learns which one people prefer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ftk.data.supervised.row import Row
from ftk.errors import UserError, counted
from ftk.registry import register_task
from ftk.tasks.answering.questions import Question
from ftk.tasks.answering.samples import AnswerDataset
from ftk.tasks.answering.task import RowQuestions
from ftk.tasks.preference.pairs import pair_of
from ftk.tasks.preference.samples import PairCollater, PairDataset
from ftk.tasks.sft.task import SFTTask, TemplateConfig, question_of
from ftk.tasks.sft.template import load_template

if TYPE_CHECKING:
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


@register_task("preference", config=TemplateConfig, criterion="preference", dataset="rows")
class PreferenceTask(SFTTask):
    """The better one of two answers; a model is asked as one that was trained by sft."""

    @classmethod
    def questions(cls, config: Any, tokenizer: Tokenizer) -> RowQuestions:
        template = load_template(config.template, tokenizer)

        def of_row(row: Row) -> Iterator[Question]:
            pair = pair_of(row)
            yield question_of(template, pair.messages, pair.chosen, pair.place)

        return dataclasses.replace(super().questions(config, tokenizer), of_row=of_row)

    def load_split(self, split: str) -> PairDataset:
        template = load_template(self.config.template, self.tokenizer)
        pairs = [pair_of(row) for row in self.rows(split)]
        sides = [
            self.encoded(
                (question_of(template, pair.messages, getattr(pair, side), pair.place) for pair in pairs),
                f"{split}, {side}",
            )
            for side in ("chosen", "rejected")
        ]
        differ = [not np.array_equal(one.answer, other.answer) for one, other in zip(*sides, strict=True)]
        if not all(differ):
            first, count = pairs[differ.index(False)].place, len(pairs) - sum(differ)
            text = f"{split}: {count} of {counted(len(pairs), 'pair')}, the first at {first}, have two answers that are"
            if not any(differ):
                raise UserError(f"{text} the same as far as `target_length` {self.config.target_length} reaches")
            logger.warning("%s the same, as far as they are read; they are left out", text)
        asking = self.asking_of_model()
        kept = [[one for one, differs in zip(side, differ, strict=True) if differs] for side in sides]
        return PairDataset(*(AnswerDataset(asking, side) for side in kept))

    def collater(self) -> PairCollater:
        return PairCollater(self.tokenizer.special)
