"""Tokens and the text that they write: behind other tokens, and token by token in whole characters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import NamedTuple

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # what a tokenizer writes for bytes that are no character, or not yet a whole one
MOST_BYTES_LACKING = 3  # UTF-8 has up to four bytes a character
_MOST_BEFORE = 8
"""Tokens before others that decide whether these begin with a space, and which characters their bytes complete."""


def text_behind(decode: Decode, before: Sequence[int], tokens: Sequence[int], separator: str = "") -> str:
    """How tokens read behind others, with the space that the tokenizer puts between.

    Args:
        decode: from ids to text.
        before: ids in front; only the last few are decoded.
        tokens: ids.
        separator: stands in front where the tokenizer changes the text before these tokens because of them.
    """
    before = list(before[-_MOST_BEFORE:])
    left, joined = decode(before), decode([*before, *tokens])
    return joined[len(left) :] if joined.startswith(left) else separator + decode(tokens)


def texts_behind(decode: Decode, before: Sequence[int], tokens: Sequence[int]) -> list[str]:
    """The text of each token in its context; concatenated they are the text of all.

    A token's text is what is settled with it: no later token changes that. So a whole character is the text of the
    token with its last byte, a byte that becomes no character is that of the token that has it, and parts of an answer
    have the same texts as the whole wherever it is cut between settled texts, as streams cut it.

    Args:
        decode: from ids to text.
        before: ids in front of all tokens.
        tokens: ids.
    """
    ids, found = [*before[-_MOST_BEFORE:], *tokens], []
    first, given = min(len(before), _MOST_BEFORE), ""  # all text before `first` is given, and this of what is behind
    for end in range(first + 1, len(ids) + 1):
        left = ids[max(0, first - _MOST_BEFORE) : first]
        text = settled = text_behind(decode, left, ids[first:end])
        if text.endswith(REPLACEMENT):  # maybe a part of a character, of which the next tokens have the rest
            later = range(end + 1, min(end + MOST_BYTES_LACKING, len(ids)) + 1)
            texts = (text, *(text_behind(decode, left, ids[first:stop]) for stop in later))
            settled = commonprefix(texts)  # noqa: RUF071
        found.append(settled[len(given) :])
        first, given = (end, "") if settled == text else (first, settled)
    return found


class TokenText(NamedTuple):
    """A part of an answer's text, with the log-probabilities of the tokens that wrote it, mostly one."""

    text: str
    logprobs: tuple[float, ...]


def token_texts(words: str, tokens: Sequence[int], logprobs: Sequence[float], decode: Decode) -> list[TokenText]:
    """An answer's text in parts.

    Tokens whose text is not known before a later token comes, such as bytes of one character, share a part. Tokens that
    a stop string has cut off are in no part.

    Args:
        words: the answer as it is shown, without white space around it.
        tokens: its ids, without the end token; none of a label.
        logprobs: theirs; what follows, the end token's, is not used.
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
        parts.append(TokenText(words[shown:], rest or tuple(logprobs[: len(tokens) or 1])))
    return parts
