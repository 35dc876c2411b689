"""How a model is asked in texts, in rows and in conversations: its framing, and what its task puts around them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ftk.tasks.answering.samples import AskedQuestions

if TYPE_CHECKING:
    from ftk.generation.engine.request import Framing
    from ftk.generation.text import Converse
    from ftk.tasks.answering.asking import Asking
    from ftk.tasks.answering.questions import Question, QuestionEncoder
    from ftk.tasks.answering.task import QuestionConfig, RowQuestions


class TextFraming:
    """The framing of a model, and how its task makes prompts of texts and of rows.

    Args:
        framing: whose attributes and methods this has, too.
        asking, encoder, questions: of the task.
        options: its lengths.

    Attributes:
        of_row, of_text: as of `RowQuestions`.
        no_answer: what the model writes where a window does not hold the answer; None: it did not learn that.
    """

    def __init__(
        self,
        framing: Framing,
        asking: Asking,
        encoder: QuestionEncoder,
        questions: RowQuestions,
        options: QuestionConfig,
    ) -> None:
        self.framing = framing
        self._asking, self._encoder, self._questions, self._options = asking, encoder, questions, options
        self.of_row, self.of_text = questions.of_row, questions.of_text
        self.no_answer = None if questions.windows is None else questions.windows.no_answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "framing":  # looked for while an object is copied
            raise AttributeError(name)
        return getattr(self.framing, name)

    def ask_text(self, text: str, answer: str) -> tuple[Any, Sequence[int]]:
        """The prompt of a text, and the token ids of its answer with their end."""
        question = self._encoder.whole(dataclasses.replace(self.of_text(text), answer=answer))
        prompt = self._asking.prompt(question.before.tolist(), question.behind.tolist())
        return prompt, question.answer.tolist()

    @property
    def converse(self) -> Converse | None:
        """How it takes part in conversations; None: the task knows none."""
        return None if self._questions.of_messages is None else self._prompt_of_messages

    def _prompt_of_messages(self, text: str, earlier: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> Any:
        if not earlier and not values:
            return self.ask_text(text, "")[0]
        assert self._questions.of_messages is not None, "else there is no `converse`"
        asked = self._questions.of_messages([*earlier, {"role": "user", "content": text}], values)
        # Of a long conversation the oldest turns are left out, as in training.
        options = self._options
        (question,) = self._encoder.within([asked], options.seq_length, options.target_length, options.truncate)
        return self._asking.prompt(question.before.tolist(), question.behind.tolist())

    def encoded(self, questions: Sequence[Question]) -> AskedQuestions:
        """Questions with the task's lengths: each, or each of its windows."""
        alone = (dataclasses.replace(question, answer="") for question in questions)
        options = self._options
        lengths = options.seq_length, options.target_length
        found = self._encoder.within(alone, *lengths, options.truncate, windows=self._questions.windows)
        return AskedQuestions(self._asking, found)
