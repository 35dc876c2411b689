"""Which part of an answer's text each of its tokens has written: whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class TokenText(NamedTuple):
    """A part of an answer's text, with the log-probabilities of the tokens that wrote it, mostly one."""

    text: str
    logprobs: tuple[float, ...]


def token_texts(
    words: str, tokens: Sequence[int], logprobs: Sequence[float], decode: Callable[[Sequence[int]], str]
) -> list[TokenText]:
    """An answer's text in parts.

    Bytes of one character that are spread over several tokens are one part, as is all that a tokenizer writes
    otherwise alone than in its place. What stands in no part, because a stop text has cut it off, is nowhere.

    Args:
        words: the answer as it is shown, without white space around it.
        tokens: its ids, without the end token.
        logprobs: theirs; what follows, the end token's, is not looked at.
        decode: from ids to text.

    Returns:
        parts that make `words` when they are joined.
    """
    parts: list[TokenText] = []
    shown, first = 0, 0  # characters, and the first token that is not in a part yet
    for count in range(1, len(tokens) + 1):
        begun = decode(tokens[:count]).lstrip()
        # Half a character is decoded as something that does not stand in the whole text.
        if len(begun) > shown and words.startswith(begun):
            parts.append(TokenText(words[shown : len(begun)], tuple(logprobs[first:count])))
            shown, first = len(begun), count
    if shown < len(words):
        rest = tuple(logprobs[first : len(tokens)])
        parts.append(TokenText(words[shown:], rest or tuple(logprobs[: len(tokens)])))
    return parts
