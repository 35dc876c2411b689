"""How a phrase may be spelled in tokens, and where phrases stand in a row of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from ftk.errors import UserError

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

Spelling: TypeAlias = tuple[int, ...]


def spellings(tokenizer: Tokenizer, text: str, option: str) -> list[Spelling]:
    """The token rows that the tokenizer itself makes of a text: behind a space, at the beginning, behind a sign.

    Byte-level BPE spells " word" and "word" differently, SentencePiece puts its own space in front: which of
    them stands in an answer depends on the blank. Rows with other cuts within the text are not among them.

    Args:
        tokenizer: encodes.
        text: without command tokens; their names are letters like others.
        option: who asks, for messages.

    Returns:
        the different ones, the one behind a space first.

    Raises:
        UserError: the tokenizer makes no tokens of it, or does not know a part of it.
    """
    behind_sign = tokenizer.encode("，" + text)
    sign = tokenizer.encode("，")
    rows = [tokenizer.encode(" " + text), tokenizer.encode(text)]
    if behind_sign[: len(sign)] == sign:
        rows.append(behind_sign[len(sign) :])
    found = list(dict.fromkeys(tuple(row) for row in rows if row))
    if not found:
        raise UserError(f"{option} {text!r}: the tokenizer makes no tokens of it")
    unk = tokenizer.special.unk
    if unk is not None and any(unk in row for row in found):
        raise UserError(f"{option} {text!r}: the tokenizer does not know a part of it; it would stand for anything")
    return found


def holds(row: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `part` stands in `row`, its tokens side by side."""
    return any(tuple(row[i : i + len(part)]) == tuple(part) for i in range(len(row) - len(part) + 1))


class PhraseTrie:
    """Recognises rows of tokens in a stream (Aho & Corasick 1975): after each token, the longest that may begin.

    State 0 is the beginning. `strings[s]` is the longest beginning of one of the rows that the stream ends in.

    Args:
        rows: what is looked for, none empty.
    """

    def __init__(self, rows: Iterable[Spelling]) -> None:
        self.rows = list(rows)
        prefixes = {row[:length] for row in self.rows for length in range(len(row) + 1)} | {()}
        self.strings: list[Spelling] = sorted(prefixes, key=lambda one: (len(one), one))
        self._state = {string: state for state, string in enumerate(self.strings)}
        self.tokens = sorted({token for row in self.rows for token in row})
        self._next = {
            (state, token): self._longest((*string, token))
            for state, string in enumerate(self.strings)
            for token in self.tokens
        }
        # Rows that end where this state is reached: all that its string ends with.
        self.ending: list[list[int]] = [
            [index for index, row in enumerate(self.rows) if string[-len(row) :] == row] for string in self.strings
        ]

    def advance(self, state: int, token: int) -> int:
        """The state after one more token."""
        return self._next.get((state, token), 0)

    def _longest(self, string: Spelling) -> int:
        """State of the longest end of `string` that some row begins with."""
        return next(self._state[string[i:]] for i in range(len(string) + 1) if string[i:] in self._state)
