"""Answers to questions: what models do that learned it from rows of questions and answers, of any family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ftk.generation.engine.request import Framing, Request
from ftk.generation.results import EncodedText
from ftk.generation.text_to_text import TextToText

if TYPE_CHECKING:
    from ftk.data.supervised.row import Row
    from ftk.generation.text import Converse


class TextFraming:
    """The framing of a model, and how its task makes prompts of texts and of rows.

    Args:
        framing: whose attributes and methods this has, too.
        ask: (text, answer) -> the prompt, and the token ids of the answer with their end.
        converse: None: the task knows no conversations.
        of_row: row -> the questions that the task makes of it.
        of_text: text -> a question.
        encoded: questions -> for each, or for each of its windows, `prompt`, `answer`, `shown`, `reference`, `was_cut`
            and the `number` of the question, with the task's lengths.
        no_answer: what the model writes where a window does not hold the answer; None: it did not learn that.
    """

    def __init__(
        self,
        framing: Framing,
        ask: Callable[[str, str], tuple[Any, Sequence[int]]],
        converse: Converse | None,
        of_row: Callable[[Row], Iterable[Any]],
        of_text: Callable[[str], Any],
        encoded: Callable[[Sequence[Any]], Sequence[Mapping[str, Any]]],
        no_answer: str | None = None,
    ) -> None:
        self.framing, self.ask_text, self.converse = framing, ask, converse
        self.of_row, self.of_text, self.encoded, self.no_answer = of_row, of_text, encoded, no_answer

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "framing":  # looked for while an object is copied
            raise AttributeError(name)
        return getattr(self.framing, name)


class TextAnswerer(TextToText):
    """A model with its tokenizer: each text is a question, put as in training, to which there is one answer.

        generator.generate("How many legs has a spider?").text

    The text of a result is that of the answer. A text may be the last message of a conversation, whose earlier ones are
    then an option of the prompt: `messages`, see `TextContinuer`. See `TextGenerator` for the arguments.
    """

    example: ClassVar[str] = "How many legs has a spider?"
    invitation = "Write a question"

    framing: Any  # a TextFraming

    @property
    def conversation(self) -> Converse | None:
        converse: Converse | None = self.framing.converse
        return converse

    def encode_sample(self, sample: Mapping[str, Any]) -> EncodedText:
        """A question with its answer as the reference, see `ftk.tasks.answering.samples.AskedQuestions`.

        Raises:
            UserError: the model has no positions for it.
        """
        request = Request(sample["prompt"], self.config, self.steering.processors, self.config.seed)
        self.framing.check(request)
        candidate = self.framing.continuation(sample["answer"])
        return EncodedText(sample["shown"], request, candidates=[candidate], references=[sample["reference"]])

    def _prompt_ids(self, text: str) -> Any:
        return self.framing.ask_text(text, "")[0]

    def _tokens_behind(self, ids: Any, prompt: str, text: str) -> list[int]:
        return [*self.framing.ask_text(prompt, text)[1]][:-1]
