"""Texts with several blanks and the answer to each as a model reads and learns them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from ftk.errors import UserError, naming_place
from ftk.generation.engine.request import WORD
from ftk.tasks.answering.asking import Asking
from ftk.tasks.answering.questions import EncodedQuestion, Question, QuestionEncoder, Windows, log_counts
from ftk.tasks.glm_blank.infill.blanks import find_blanks
from ftk.tasks.glm_blank.infill.framing import BlankFraming, BlankPrompt
from ftk.tasks.glm_blank.infill.questions import split_answers
from ftk.tasks.glm_blank.infill.reader import BlankReader
from ftk.tasks.glm_blank.infill.scoring import encode_answers
from ftk.tasks.glm_blank.infill.truncation import truncate as truncated
from ftk.tokenizers.base import Tokenizer


@dataclass(frozen=True)
class BlankQuestion(Question):
    """A text with blanks, in `before`; its `answer` is the text with all answers in their places.

    Attributes:
        answers: one for each blank.
        misspelt_blanks: as of `BlankReader.read`.
    """

    answers: Sequence[str] = ()
    misspelt_blanks: str = "refuse"


class RowFraming(BlankFraming):
    """Is asked with whole texts that have blanks of their own; their answers follow each other, each with its end."""

    has_several_answers = True

    def ask(
        self, before: Sequence[int], behind: Sequence[int] = (), expected: str = WORD, closed: bool | None = None
    ) -> BlankPrompt:
        """All blanks of a whole text; a text without any as `BlankFraming` asks it."""
        if not find_blanks(before, self.masks):
            return super().ask(before, behind, expected, closed)
        return self.prompt(before)

    def continuation(self, answer: Sequence[int]) -> dict[int, list[int]]:
        return dict(enumerate(split_answers(answer, self.ends[0]) or [[]]))


class BlankAsking(Asking):
    """Texts are read with all that belongs to them, so that nothing is added."""

    def added(self, has_behind: bool, is_whole: bool = True) -> tuple[int, int]:
        return 0, 0

    def check_room(self, seq_length: int, target_length: int, whose: str = "") -> None:
        Asking(self.framing, self.expected).check_room(seq_length, target_length, whose)


class BlankEncoder(QuestionEncoder):
    """Token ids of texts with blanks, as `BlankFiller` reads prompts, and of their answers, as it scores them."""

    def __init__(self, tokenizer: Tokenizer, asking: Asking) -> None:
        super().__init__(tokenizer, asking)
        self.reader = BlankReader(tokenizer)

    def within(
        self,
        questions: Iterable[Question],
        seq_length: int,
        target_length: int,
        truncate: str,
        where: str = "rows",
        windows: Windows | None = None,
    ) -> list[EncodedQuestion]:
        """See `QuestionEncoder.within`. A text that is too long loses tokens, and blanks with their answers only where
        not all of them fit; of all answers together the last tokens are cut. The reference of a text that is cut is
        what is kept of it, with the whole answers to its blanks.

        Raises:
            UserError: as `BlankReader.read`; there are more answers than blanks, or fewer.
        """
        found: list[EncodedQuestion] = []
        for number, question in enumerate(questions):
            assert isinstance(question, BlankQuestion), "its task asks no others"
            with naming_place(question.place):
                pieces, ids = self.reader.read(question.shown, question.misspelt_blanks)
                answers = [[*answer, self.end] for answer in encode_answers(self.tokenizer, pieces, question.answers)]
                kept, answers = self._kept(ids, answers, seq_length, truncate)
            answer = [token for ids in answers for token in ids]
            found.append(
                EncodedQuestion(
                    np.array(kept, dtype=np.int32),
                    np.zeros(0, dtype=np.int32),
                    np.array(answer[:target_length], dtype=np.int32),
                    len(answer) <= target_length,
                    question.shown,
                    self._filled(kept, answers) if len(kept) < len(ids) else question.answer,
                    len(kept) < len(ids),
                    number,
                )
            )
        num_cut = sum(encoded.was_cut for encoded in found)
        num_cut_answers = sum(not encoded.is_whole for encoded in found)
        log_counts(
            where,
            (num_cut, len(found), f"texts are longer than `seq_length` {seq_length}: cut"),
            (
                num_cut_answers,
                len(found),
                f"texts have answers of more than `target_length` {target_length} tokens together: the last are cut",
            ),
        )
        return found

    def _filled(self, context: Sequence[int], answers: Sequence[Sequence[int]]) -> str:
        """A context with its answers, which have ends, in their places: all that a model can say of a cut text."""
        rest, around = iter(answers), (self.tokenizer.special.cls, self.tokenizer.special.eos)
        parts = (next(rest)[:-1] if token in self.reader.masks else [token] for token in context if token not in around)
        return self.tokenizer.decode([token for part in parts for token in part])

    def _kept(
        self, ids: list[int], answers: list[list[int]], seq_length: int, side: str
    ) -> tuple[list[int], list[list[int]]]:
        """What stays of a text, and the answers to the blanks in it."""
        special, masks = self.tokenizer.special, self.reader.masks
        begin, end = ([token] if token is not None else [] for token in (special.cls, special.eos))
        room = seq_length - len(begin) - len(end)
        if room < 1:
            raise UserError(f"`seq_length` {seq_length} has no room for a text; raise it")
        while len(ids) > seq_length:
            places = find_blanks(ids, masks)
            if places[-1] - places[0] < room:
                return truncated(ids, masks, seq_length, side, (special.cls, special.eos)), answers
            if side == "right":
                ids, answers = [*ids[: places[-1]], *end], answers[:-1]
            else:
                ids, answers = [*begin, *ids[places[0] + 1 :]], answers[1:]
        return ids, answers
