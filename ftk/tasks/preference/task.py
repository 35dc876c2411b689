"""The task preference: of two answers to the same question, a model learns which one people prefer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ftk.batch import Batch
from ftk.data.batches.collate import Collater
from ftk.data.supervised.row import Row, read_each
from ftk.errors import UserError
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

_SIDES = ("chosen", "rejected")


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

    def make_samples(self, rows: Sequence[Row], seed: int) -> PairDataset:  # type: ignore[override]
        template = load_template(self.config.template, self.tokenizer)
        pairs, source = [*read_each(rows, pair_of)], rows[0].source
        sides = [
            self.encoded(
                (question_of(template, pair.messages, getattr(pair, side), pair.place) for pair in pairs),
                f"{source}, {side}",
            )
            for side in _SIDES
        ]
        differ = [not np.array_equal(chosen.answer, rejected.answer) for chosen, rejected in zip(*sides, strict=True)]
        if not all(differ):
            first = pairs[differ.index(False)].place
            reach = f"as far as `target_length` {self.config.target_length} reaches"
            if not any(differ):
                raise UserError(f"{first}: both answers are the same, {reach}, as those of all pairs of {source}")
            logger.warning(
                "%s: %d of %d pairs are left out, whose answers are the same, %s; the first is %s",
                source, len(pairs) - sum(differ), len(pairs), reach, first,
            )  # fmt: skip
        asking = self.asking_of_model()
        kept = [[answer for answer, differs in zip(side, differ, strict=True) if differs] for side in sides]
        return PairDataset(*(AnswerDataset(asking, side) for side in kept))

    def collater(self) -> PairCollater:
        return PairCollater(self.tokenizer.special)

    def shown(self, sample: dict[str, Any]) -> dict[str, Batch]:
        of_row = Collater(self.tokenizer.special)
        return {f", {side}": of_row([row]) for side, row in zip(_SIDES, sample["rows"], strict=True)}
