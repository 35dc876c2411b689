"""Text of answers as their tokens come: whole characters, of which nothing is taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ftk.errors import UserError

_REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not yet a whole one
_MOST_BYTES_LACKING = 3  # UTF-8 has up to four bytes a character


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
            raise text_changed(self.text, text)
        return text[len(self.text) :]


def whole_characters(text: str) -> str:
    """A text without what at its end may be a part of a character, whose other bytes come with later tokens."""
    end = len(text)
    while end > max(0, len(text) - _MOST_BYTES_LACKING) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


def text_changed(told: str, text: str) -> UserError:
    """The error for text that was told and is no part of the text in the end."""
    return UserError(
        f"the tokenizer wrote {told!r} first and {text!r} in the end: its text of tokens changes with later tokens, "
        "so it cannot be told piece by piece; use fill"
    )
