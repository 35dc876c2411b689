"""Text of answers to the blanks of a prompt, as their tokens come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.generation.results import Span, TextPiece
from ftk.generation.streaming import AnswerText, text_changed, whole_characters
from ftk.tasks.glm_blank.infill.filled_text import FilledText

if TYPE_CHECKING:
    from ftk.generation.engine.request import Event
    from ftk.generation.search import Answer
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt


class PromptStream:
    """One prompt: events in, pieces of text out.

    Args:
        filler: describes answers.
        prompt: as the model reads it.
    """

    def __init__(self, filler: BlankFiller, number: int, prompt: EncodedPrompt) -> None:
        self.filler, self.number, self.prompt = filler, number, prompt
        self.processors = prompt.request.processors
        self.answers: dict[int, Answer] = {}  # the complete ones, by the numbers of their blanks
        self._open: dict[int, AnswerText] = {}
        self._filled = FilledText(filler.tokenizer, filler.framing.masks, prompt)
        self._shown = ""  # of the filled text

    def add(self, event: Event) -> TextPiece | None:
        """The text that an event makes known; None where no whole character is new."""
        line = self._open.setdefault(event.number, AnswerText(self.filler.tokenizer.decode, self.settled))
        if event.answer is not None:
            del self._open[event.number]
            return self._last(event.number, line, event.answer)
        new = line.add(event.tokens, event.logprobs, event.alternatives)
        if not new.text:
            return None
        partial = ""
        if event.number == self._filled.number:
            partial = self._filled.begin(line.tokens[: line.num_given], line.whole, self.settled)
        filled = self._newly_filled(partial)
        return TextPiece(self.number, event.number, *new[:3], *filled, alternatives=new.alternatives)

    def _last(self, blank: int, line: AnswerText, answer: Answer) -> TextPiece:
        """The last piece of a blank."""
        self.answers[blank] = answer
        described = self.filler.described(self.prompt, self.prompt.blanks[blank], answer)
        new = line.rest(described.text, answer)
        while self._filled.number in self.answers:
            self._filled.fill(self.answers[self._filled.number].tokens)
        result = None
        if len(self.answers) == len(self.prompt.blanks):
            result = self.filler.result(self.prompt, [self.answers[number] for number in sorted(self.answers)])
        filled = self._newly_filled("")
        return TextPiece(self.number, blank, *new[:3], *filled, described, result, new.alternatives)

    def _newly_filled(self, partial: str) -> tuple[str, tuple[Span, ...]]:
        """What is new in the filled text, which ends in the words `partial`, and where answers stand in it."""
        text, start = self._filled.text + partial, len(self._shown)
        if not text.startswith(self._shown):
            raise text_changed(self._shown, text)
        self._shown = text
        spans = [*self._filled.spans, self._filled.span(partial)] if partial else self._filled.spans
        inside = [
            Span(max(low - start, 0), high - start, blank)
            for blank, (low, high) in enumerate(spans)
            if high > max(low, start)
        ]
        return text[start:], tuple(inside)

    def settled(self, text: str) -> str:
        """The part of a text that no later token changes or cuts off."""
        return self.processors.settled(whole_characters(text))
