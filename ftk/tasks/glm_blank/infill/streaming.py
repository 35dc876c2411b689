"""Text of answers as their tokens come: whole characters, of which nothing is taken back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftk.generation.streaming import AnswerText, text_changed, whole_characters

if TYPE_CHECKING:
    from ftk.generation.search import Answer
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.generator import NewTokens
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt, FilledBlank, FillResult


class Span(NamedTuple):
    """Where a part of an answer stands in a text, and the number of its blank."""

    start: int
    end: int
    blank: int


@dataclass(frozen=True)
class Piece:
    """New text of the answer to one blank, with the tokens that it consists of.

    All pieces of a blank, joined, have the text, the tokens and the log-probabilities of its answer; the `filled` of
    all pieces of a prompt are its filled text.

    Attributes:
        prompt: number of the prompt, from 0 on.
        blank: number of its blank, from 0 on, from left to right.
        text: what the answer's text goes on with; "" only in a last piece.
        tokens: ids, without the end token.
        token_logprobs: natural logarithms of their probabilities; the end token's comes with the last piece.
        filled: what the filled text goes on with, as far as it is known from its beginning on.
        filled_spans: where parts of answers stand in `filled`: of this one or, where blanks are not filled from left
            to right, of others.
        answer: the complete answer, with the last piece of a blank.
        result: the filled prompt, with the last piece of a prompt.
    """

    prompt: int
    blank: int
    text: str
    tokens: list[int]
    token_logprobs: list[float]
    filled: str = ""
    filled_spans: tuple[Span, ...] = ()
    answer: FilledBlank | None = None
    result: FillResult | None = None

    @property
    def number(self) -> int:
        """Of the answer: that of its blank."""
        return self.blank


class PromptStream:
    """One prompt: tokens in, pieces of text out.

    Args:
        filler: has tokenizer and processors.
        prompt: as the model reads it.
    """

    def __init__(self, filler: BlankFiller, prompt: EncodedPrompt) -> None:
        self.filler = filler
        self.prompt = prompt
        self.processors = filler.processors_of(prompt)
        self.answers: dict[int, Answer] = {}  # those that are complete, by the numbers of their blanks
        self._open: dict[int, AnswerText] = {}
        self._filled = filler.filled_text(prompt)
        self._shown = ""  # what was told of the filled text

    def add(self, new: NewTokens) -> Piece | None:
        """The next tokens of an answer: what they make known; None where that is no whole character."""
        line = self._open.setdefault(new.blank, AnswerText(self.filler.tokenizer.decode, self.settled))
        if new.answer is not None:
            del self._open[new.blank]
            return self._last(new, line, new.answer)
        text, count = line.add(new.tokens, new.token_logprobs)
        if not text:
            return None
        tokens, logprobs = line.tell(text, count)
        partial = ""
        if new.blank == self._filled.number:
            partial = self._filled.words(line.tokens[: line.num_told], self.settled).rstrip()
        return Piece(new.prompt, new.blank, text, tokens, logprobs, *self._newly_filled(partial))

    def _last(self, new: NewTokens, line: AnswerText, answer: Answer) -> Piece:
        """The last piece of a blank."""
        self.answers[new.blank] = answer
        described = self.filler.describe_blank(self.prompt, new.blank, answer)
        text = line.rest(described.text)
        while self._filled.number in self.answers:
            self._filled.fill(self.answers[self._filled.number].tokens)
        filled, spans = self._newly_filled("")
        result = None
        if len(self.answers) == len(self.prompt.pieces) - 1:
            result = self.filler.result(self.prompt, [self.answers[number] for number in sorted(self.answers)])
        rest = answer.tokens[line.num_told :], answer.token_logprobs[line.num_told :]
        return Piece(new.prompt, new.blank, text, *rest, filled, spans, described, result)

    def _newly_filled(self, partial: str) -> tuple[str, tuple[Span, ...]]:
        """What is new in the filled text, which goes on with the words `partial`, and where answers stand in it."""
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
        """So much of a text as no later token changes or cuts off."""
        return self.processors.settled(whole_characters(text))
