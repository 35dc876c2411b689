"""Text of answers as their tokens come: whole characters, of which nothing is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ftk.errors import UserError
from ftk.generation.results import Span, TextAnswer, TextPiece, TextResult
from ftk.generation.token_text import MOST_BYTES_LACKING, REPLACEMENT, Decode, text_behind

if TYPE_CHECKING:
    from ftk.generation.engine.request import Event
    from ftk.generation.search.answer import Alternatives, Answer


class NewText(NamedTuple):
    """The next part of an answer's text, with its tokens and their log-probabilities; "" while nothing is settled.

    `alternatives` are the likeliest tokens in the place of each, if they were asked for.
    """

    text: str
    tokens: Sequence[int]
    token_logprobs: Sequence[float]
    alternatives: Sequence[Sequence[tuple[int, float]]] = ()


class AnswerText:
    """The text of one answer while its tokens come.

    A part of the text ends where a token ends. Tokens are held back that end within a character or may belong to a stop
    string and, where `strip` removes it, white space at the end. Only tokens that are held back are decoded again.

    Args:
        decode: from ids to text.
        settled: the part of a text that no later token changes or cuts off.
        before: ids that the answer stands behind.
        strip: takes white space from the ends of a text, or leaves it.
    """

    def __init__(
        self,
        decode: Decode,
        settled: Callable[[str], str],
        before: Sequence[int] = (),
        strip: Callable[[str], str] = str.strip,
    ) -> None:
        self.decode, self.settled, self.strip = decode, settled, strip
        self.before = list(before)  # and then the tokens of what was given
        self.text = ""  # given so far
        self.tokens: list[int] = []
        self.token_logprobs: list[float] = []
        self.alternatives: list[Sequence[tuple[int, float]]] = []
        self.num_given = 0  # tokens
        self.whole = ""  # their text, before `strip`
        self._texts: list[str | None] = []  # of the first `num_given` + 1 tokens, + 2, ...; None: not asked for yet

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], alternatives: Alternatives = ()) -> NewText:
        """Takes more tokens; returns the text that is settled now and new."""
        self.tokens.extend(tokens)
        self.token_logprobs.extend(logprobs)
        self.alternatives.extend(alternatives)
        self._texts.extend([None] * len(tokens))
        count = len(self._texts)
        settled = self.settled(self._text(count))
        while count and not settled.startswith(self._text(count)):
            count -= 1
        # A token that adds nothing goes with the text behind it, as where a stop string cuts an answer.
        while count > 1 and self.strip(self._text(count)) == self.strip(self._text(count - 1)):
            count -= 1
        begun = self._text(count)
        text = self.strip(begun)
        if not text.startswith(self.text) or len(text) == len(self.text):
            return NewText("", (), ())
        part = slice(self.num_given, self.num_given + count)
        new = NewText(text[len(self.text) :], self.tokens[part], self.token_logprobs[part], self.alternatives[part])
        self.text, self.whole, self.num_given = text, begun, part.stop
        self.before.extend(new.tokens)
        del self._texts[:count]
        return new

    def _text(self, count: int) -> str:
        """What was given with `count` more tokens, before `strip`."""
        if count == 0:
            return self.whole
        found = self._texts[count - 1]
        if found is None:
            new = self.tokens[self.num_given : self.num_given + count]
            found = self._texts[count - 1] = self.whole + text_behind(self.decode, self.before, new)
        return found

    def rest(self, text: str, answer: Answer) -> NewText:
        """The part of the complete answer that was not given yet.

        Args:
            answer: its tokens.

        Raises:
            UserError: what was given is no part of it; no tokenizer of ftk's does that.
        """
        if not text.startswith(self.text):
            raise text_changed(self.text, text)
        part = slice(self.num_given, None)
        new = answer.tokens[part], answer.token_logprobs[part], answer.alternatives[part]
        return NewText(text[len(self.text) :], *new)


class OnePassStream:
    """One prompt whose answers come all at once: each in one piece.

    Args:
        count: of its answers.
        described: an answer in words.
        result: of all its answers.
    """

    def __init__(
        self,
        number: int,
        count: int,
        described: Callable[[Answer], TextAnswer],
        result: Callable[[Sequence[Answer]], TextResult],
    ) -> None:
        self._number, self._count, self._described, self._result = number, count, described, result
        self._answers: list[Answer] = []

    def add(self, event: Event) -> TextPiece:
        """The answer; the text comes with the last one."""
        assert event.answer is not None
        self._answers.append(event.answer)
        answer, result = self._described(event.answer), None
        filled, spans = "", ()  # type: tuple[str, tuple[Span, ...]]
        if len(self._answers) == self._count:
            result = self._result(self._answers)
            filled = result.text
            spans = tuple(Span(*span, place) for place, span in enumerate(result.spans))
        given = answer.text, answer.tokens, answer.token_logprobs
        return TextPiece(self._number, event.number, *given, filled, spans, answer, result, answer.alternatives)


def whole_characters(text: str) -> str:
    """A text without what at its end may be a part of a character, whose other bytes come with later tokens."""
    end = len(text)
    while end > max(0, len(text) - MOST_BYTES_LACKING) and text[end - 1] == REPLACEMENT:
        end -= 1
    return text[:end]


def text_changed(given: str, text: str) -> UserError:
    """The error for text that was given and is no part of the text in the end."""
    return UserError(
        f"the tokenizer wrote {given!r} first and {text!r} in the end: its text of tokens changes with later tokens, "
        "so it cannot be given piece by piece; use the method that returns whole answers (fill or generate)"
    )
