"""Text of answers as their tokens come: whole characters, of which nothing is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.generation.search import Answer
    from ftk.generation.token_stream import NewTokens
    from ftk.tasks.glm_blank.infill.fill import BlankFiller
    from ftk.tasks.glm_blank.infill.results import EncodedPrompt, FilledBlank, FillResult

_REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not yet a whole one
_MOST_BYTES_LACKING = 3  # UTF-8 has up to four bytes a character


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
            raise _changed(self._shown, text)
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


class AnswerText:
    """The text of one answer while its tokens come.

    A piece of text ends where a token ends. Tokens are kept back that end within a character, that may belong to a
    stop string, or that are white space, which does not count at the end of an answer.

    Args:
        decode: from ids to text.
        settled: so much of a text as no later token changes or cuts off.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], settled: Callable[[str], str]) -> None:
        self.decode = decode
        self.settled = settled
        self.text = ""  # what was told
        self.num_told = 0  # tokens
        self.tokens: list[int] = []
        self.token_logprobs: list[float] = []
        self._texts: list[str] = []  # of the first `num_told` + 1 tokens, + 2, ...

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[str, int]:
        """More tokens: the new text that is whole now, "" if none is, and how many tokens, of all, it ends with."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            self.tokens.append(token)
            self.token_logprobs.append(logprob)
            self._texts.append(self.decode(self.tokens))
        settled = self.settled(self._texts[-1])
        for kept in range(len(self._texts), 0, -1):
            begun = self._texts[kept - 1]
            if settled.startswith(begun):
                # A token without a text goes with the text behind it, as where a stop string cuts an answer.
                kept = 1 + self._texts.index(begun)
                text = begun.strip()
                new = text[len(self.text) :] if text.startswith(self.text) else ""
                return new, self.num_told + kept
        return "", self.num_told

    def tell(self, text: str, count: int) -> tuple[list[int], list[float]]:
        """`text`, up to token `count`, is told: its tokens and their log-probabilities."""
        part = slice(self.num_told, count)
        del self._texts[: count - self.num_told]
        self.text += text
        self.num_told = count
        return self.tokens[part], self.token_logprobs[part]

    def rest(self, text: str) -> str:
        """What was not told of the complete answer's text.

        Raises:
            UserError: what was told is no part of it; no tokenizer of ftk's does that.
        """
        if not text.startswith(self.text):
            raise _changed(self.text, text)
        return text[len(self.text) :]


def whole_characters(text: str) -> str:
    """A text without what at its end may be a part of a character, whose other bytes come with later tokens."""
    end = len(text)
    while end > max(0, len(text) - _MOST_BYTES_LACKING) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


def _changed(told: str, text: str) -> UserError:
    return UserError(
        f"the tokenizer wrote {told!r} first and {text!r} in the end: its text of tokens changes with later tokens, "
        "so it cannot be told piece by piece; use fill"
    )
