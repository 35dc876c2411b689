"""Answers to questions: what models do that learned it from rows of questions and answers, of any family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ftk.generation.engine.request import Request
from ftk.generation.results import EncodedText
from ftk.generation.text import Converse
from ftk.generation.text_to_text import TextToText


class TextAnswerer(TextToText):
    """A model with its tokenizer: each text is a question, put as in training, to which there is one answer.

        generator.generate("How many legs has a spider?").text

    The text of a result is that of the answer. A text may be the last message of a conversation, whose earlier ones are
    then an option of the prompt: `messages`, see `TextContinuer`. See `TextGenerator` for the arguments.
    """

    example: ClassVar[str] = "How many legs has a spider?"
    invitation = "Write a question"

    framing: Any  # ftk.tasks.answering.text_framing.TextFraming

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
