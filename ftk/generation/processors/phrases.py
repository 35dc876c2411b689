"""How a phrase may be spelled in tokens, and where phrases stand in a row of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from ftk.errors import UserError, shown

if TYPE_CHECKING:
    from ftk.tokenizers import Tokenizer

Spelling: TypeAlias = tuple[int, ...]


def spellings(tokenizer: Tokenizer, text: str, option: str) -> list[Spelling]:
    """The token rows that the tokenizer itself makes of a text: behind a space, at the beginning, behind a sign.

    Byte-level BPE spells " word" and "word" differently, SentencePiece puts its own space in front: which of
    them stands in an answer depends on the text before it. Rows with other cuts within the text are not among them.

    Args:
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
        raise UserError(f"{option} {shown(text)}: the tokenizer makes no tokens of it")
    unk = tokenizer.special.unk
    if unk is not None and any(unk in row for row in found):
        part = "the tokenizer does not know a part of it; it would stand for anything"
        raise UserError(f"{option} {shown(text)}: {part}")
    return found


class PhraseTrie:
    """Recognises rows of tokens in a stream (Aho & Corasick 1975): after each token, the longest that may begin.

    State 0 is the beginning. A state stands for the longest beginning of one of the rows that the stream ends in.
    Time and memory grow with the tokens of all rows.

    Args:
        rows: what is looked for, none empty.

    Attributes:
        ends: for each row the state in which all of it has come.
        ending: for each state the rows that end there, as numbers.
        through: for each state the rows that begin with what it stands for, as numbers.
    """

    def __init__(self, rows: Iterable[Spelling]) -> None:
        self.rows = list(rows)
        self.through: list[list[int]] = [list(range(len(self.rows)))]
        self._children: list[dict[int, int]] = [{}]
        self._depths = [0]
        self.ends = [self._add(number, row) for number, row in enumerate(self.rows)]
        self.ending: list[list[int]] = [[] for _ in self._children]
        for number, state in enumerate(self.ends):
            self.ending[state].append(number)
        # Of each state that of the next shorter beginning that the stream ends in.
        self._shorter = [0] * len(self._children)
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for token, child in self._children[state].items():
                if state:
                    self._shorter[child] = self.advance(self._shorter[state], token)
                self.ending[child].extend(self.ending[self._shorter[child]])
                waiting.append(child)

    def advance(self, state: int, token: int) -> int:
        """The state after one more token."""
        while state and token not in self._children[state]:
            state = self._shorter[state]
        return self._children[state].get(token, 0)

    def begun(self, state: int) -> dict[int, int]:
        """The rows of which the stream ends in a beginning, but not in all, with the tokens of its longest one."""
        found: dict[int, int] = {}
        while state:
            for number in self.through[state]:
                if len(self.rows[number]) > self._depths[state]:
                    found.setdefault(number, self._depths[state])
            state = self._shorter[state]
        return found

    def within(self, row: Spelling) -> set[int]:
        """The rows that stand in `row`, their tokens side by side."""
        found: set[int] = set()
        state = 0
        for token in row:
            state = self.advance(state, token)
            found.update(self.ending[state])
        return found

    def is_beginning(self, number: int) -> bool:
        """Whether a row stands at the beginning of another one, or is equal to it."""
        return len(self.through[self.ends[number]]) > 1

    def _add(self, number: int, row: Spelling) -> int:
        """The state in which all of a row has come, made with those on the way."""
        state = 0
        for token in row:
            child = self._children[state].get(token)
            if child is None:
                child = self._children[state][token] = len(self._children)
                self._children.append({})
                self._depths.append(self._depths[state] + 1)
                self.through.append([])
            state = child
            self.through[state].append(number)
        return state
