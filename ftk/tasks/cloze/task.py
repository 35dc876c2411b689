"""The task of choosing what stands in the gap of a pattern (Schick and Schütze 2021; Du et al. 2022, 3.2)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftk.config.options import required
from ftk.data.corpora.corpus import Corpus
from ftk.data.supervised.cloze import ClozeQuestion
from ftk.data.supervised.cloze_files import load_cloze, with_content
from ftk.data.supervised.row import Row
from ftk.errors import UserError
from ftk.generation.questions import RESTRICTED_LOGITS, CandidateConfig, check_cloze, encode_questions, scoring_of
from ftk.modules.adapters import PromptIds
from ftk.registry import EVALUATIONS, MODELS, register_task
from ftk.tasks.answers import usual_task
from ftk.tasks.base import Task
from ftk.tasks.cloze.samples import ChoiceCollater, ClozeDataset
from ftk.tasks.language_model import seq_length_option, with_room_for_rows

if TYPE_CHECKING:
    from ftk.data.sample_dataset import SampleDataset
    from ftk.generation.engine.request import Framing
    from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class ClozeConfig(CandidateConfig):
    cloze: str = required("what is asked: boolq, copa, wsc ..., or a YAML file of your own", daily=True, metavar="NAME")
    seq_length: int = seq_length_option(
        256, "most tokens of a question with a candidate; longer texts are cut where the pattern allows it", min=4
    )

    def __post_init__(self) -> None:
        self.cloze = with_content(self.cloze)


@register_task("cloze", config=ClozeConfig, criterion="choice_cross_entropy", dataset="rows")
class ClozeTask(Task):
    """The right one of the candidates for a gap, of rows of supervised data."""

    config: ClozeConfig
    reads_rows = True
    generates_as_usual = True
    complete_model_config = with_room_for_rows

    def __init__(self, config: ClozeConfig, *, corpus: Corpus, seed: int) -> None:
        super().__init__(config, corpus=corpus, seed=seed)
        self.cloze = load_cloze(config.cloze)
        self.cloze.pattern_of(config.pattern)
        self.scoring, self.end = scoring_of(self.cloze, config.candidate_scoring, config.score_end)
        self._framing: Framing | None = None
        self._prompts = PromptIds()

    @property
    def evaluation(self) -> str:
        return self.cloze.name if self.cloze.name in EVALUATIONS else "cloze"

    @property
    def pattern(self) -> int:
        """The number of the pattern by which it asks."""
        return self.cloze.pattern if self.config.pattern is None else self.config.pattern

    def for_prompts(self, prompts: PromptIds) -> None:
        self._prompts = prompts

    def for_model(self, config: Any) -> None:
        framing = self.framing(self.tokenizer, config)
        if framing is None:
            raise UserError(f"the model {MODELS.of_config(config).name} writes no answers; choose one that does")
        pattern = self.cloze.default_pattern(self.config.pattern, reads_behind=framing.reads_behind)
        check_cloze(self.cloze, pattern, self.scoring, framing, self.tokenizer)
        if pattern != self.pattern:
            self.config = dataclasses.replace(self.config, pattern=pattern)  # the checkpoint says it, too
            logger.info(
                "%s: `pattern` %d, since the model does not read the text that the usual pattern %d has after the gap",
                self.cloze.name,
                pattern,
                self.cloze.pattern,
            )
        self._framing = framing

    @classmethod
    def framing(cls, tokenizer: Tokenizer, model_config: Any) -> Framing | None:
        return usual_task(model_config).framing(tokenizer, model_config)

    def make_samples(self, rows: Sequence[Row], seed: int) -> ClozeDataset:  # type: ignore[override]
        return self._samples(rows, train=False)

    def load_training_split(self, split: str) -> SampleDataset:
        return self.composed(split, lambda rows, seed: self._samples(rows, train=True))

    def _samples(self, rows: Sequence[Row], train: bool) -> ClozeDataset:
        framing = self._framing
        if framing is None:
            raise UserError("the task cloze makes no samples before it knows the model; call for_model")
        questions = self._questions(rows, train)
        for question in questions:
            if question.right is None:
                raise UserError(
                    f"{question.place}: field {self.cloze.label!r} is missing; without labels there is no loss"
                )
        encoded = encode_questions(
            questions, framing, self.tokenizer, scoring=self.scoring, end=self.end, seq_length=self.config.seq_length
        )
        if num_cut := sum(question.was_cut for question in encoded):
            logger.info(
                "%s: %d of %d questions are cut to `seq_length` %d",
                rows[0].source,
                num_cut,
                len(encoded),
                self.config.seq_length,
            )
        if train and all(len(question.candidates) == 1 for question in questions):
            logger.warning(
                "each question has one candidate only: `choice_loss` generative or mix learns from it, cross_entropy "
                "is always 0"
            )
        return ClozeDataset(questions, encoded, framing, self.scoring == RESTRICTED_LOGITS)

    def questions(self, split: str, train: bool = False) -> list[ClozeQuestion]:
        """The questions of a split; `train`: those that are learned from."""
        corpus: Any = self.corpus
        return self._questions(corpus.rows(split), train)

    def _questions(self, rows: Sequence[Row], train: bool) -> list[ClozeQuestion]:
        reads_behind = self._framing is None or self._framing.reads_behind
        how: dict[str, Any] = {"prompts": self._prompts, "reads_behind": reads_behind}
        questions = self.cloze.questions(rows, self.config.pattern, train, **how)
        if not questions:
            raise UserError(f"{rows[0].source}: {self.cloze.name} finds no question to learn from in the rows")
        return questions

    def collater(self) -> ChoiceCollater:
        return ChoiceCollater(self.tokenizer.special)

    def show(self, split: str, *, page: str | None, width: int, num_samples: int | None, **which: Any) -> str:
        if page is not None:
            raise UserError("`html`: the task cloze draws no page of its samples; leave it out for text")
        questions = self.questions(split, train=split == "train")  # the usual name; there is no run that says another
        lines: list[str] = []
        for index in range(which["index"], which["index"] + (num_samples or 1)):
            if index >= len(questions):
                raise UserError(f"`index` {index}: the split {split} has {len(questions)} questions, from 0 on")
            question = questions[index]
            lines += [f"question {index} of {len(questions)}: {question.place}"]
            for number, candidate in enumerate(question.candidates):
                if number == 0 or len(question.texts) > 1:
                    lines += [f"  {question.text_of(number).filled('[ ... ]')}"]
                is_right = "?" if question.right is None else "*" if number in question.right else " "
                pieces = " ".join(map(self.tokenizer.token_text, self.tokenizer.encode(candidate)))
                lines += [f"  {is_right} {candidate!r}: {pieces}"]
        return "\n".join(lines)

    def describe(self) -> Iterator[str]:
        yield from super().describe()
        end = " with the end token" if self.end and self.scoring != RESTRICTED_LOGITS else ""
        yield f"{self.cloze.name}: pattern {self.pattern}, candidates scored by {self.scoring}{end}"
