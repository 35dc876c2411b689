"""How far an answer has come with the phrases that it must hold: automata over tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from ftk.generation.processors.phrases import PhraseTrie, Spelling, holds

_EXACT = 8  # phrases whose shortest arrangement is searched for; more are counted one behind the other


class Progress(ABC):
    """An automaton whose states say which phrases an answer holds, and how much of another it ends in.

    Args:
        phrases: for each phrase its spellings, of which one must come.
    """

    def __init__(self, phrases: Sequence[Sequence[Spelling]]) -> None:
        self.phrases = [list(spellings) for spellings in phrases]
        self.tokens = sorted({token for spellings in self.phrases for row in spellings for token in row})
        self._needs: dict[Hashable, int] = {}

    start: Any = None  # state of an empty answer

    @abstractmethod
    def advance(self, state: Any, token: int) -> Any:
        """The state after one more token."""

    @abstractmethod
    def forget(self, state: Any) -> Any:
        """The state after a token that no phrase holds."""

    @abstractmethod
    def _need(self, state: Any) -> int: ...

    def need(self, state: Any) -> int:
        """How many tokens at least are lacking until every phrase is there; never more than that many are."""
        if state not in self._needs:
            self._needs[state] = self._need(state)
        return self._needs[state]

    def after(self, tokens: Sequence[int]) -> Any:
        """The state of an answer."""
        state = self.start
        for token in tokens:
            state = self.advance(state, token)
        return state


class OrderedProgress(Progress):
    """Phrases one behind the other, without overlap. A state is (phrases done, place in the next one's trie)."""

    def __init__(self, phrases: Sequence[Sequence[Spelling]]) -> None:
        super().__init__(phrases)
        self._tries = [PhraseTrie(spellings) for spellings in self.phrases]
        self.start = (0, 0)

    def advance(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        done, place = state
        if done == len(self.phrases):
            return state
        trie = self._tries[done]
        place = trie.advance(place, token)
        return (done + 1, 0) if trie.ending[place] else (done, place)

    def forget(self, state: tuple[int, int]) -> tuple[int, int]:
        return (state[0], 0)

    def _need(self, state: tuple[int, int]) -> int:
        done, place = state
        lacking = sum(min(map(len, spellings)) for spellings in self.phrases[done + 1 :])
        if done < len(self.phrases):
            lacking += min(len(row) - _overlap(self._tries[done].strings[place], row) for row in self.phrases[done])
        return lacking


class UnorderedProgress(Progress):
    """Phrases in any order, which may overlap. A state is (place in the trie of all, bits of those lacking).

    What is needed is the shortest arrangement, each phrase overlapping with the one before it as far as it goes;
    for more than eight phrases that are lacking it is a bound: the rest of one, and all others whole.
    """

    def __init__(self, phrases: Sequence[Sequence[Spelling]]) -> None:
        super().__init__(phrases)
        self._rows = [(number, row) for number, spellings in enumerate(self.phrases) for row in spellings]
        self._trie = PhraseTrie([row for _, row in self._rows])
        self._place_of = {string: place for place, string in enumerate(self._trie.strings)}
        # What a spelling brings along: its own phrase, and those that stand in it.
        self._brings = [
            sum(1 << other for other, spellings in enumerate(self.phrases) if any(holds(row, one) for one in spellings))
            for _, row in self._rows
        ]
        self.start = (0, (1 << len(self.phrases)) - 1)

    def advance(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        place, lacking = self._trie.advance(state[0], token), state[1]
        for row in self._trie.ending[place]:
            lacking &= ~(1 << self._rows[row][0])
        return (place, lacking)

    def forget(self, state: tuple[int, int]) -> tuple[int, int]:
        return (0, state[1])

    def _need(self, state: tuple[int, int]) -> int:
        place, lacking = state
        if not lacking:
            return 0
        here = self._trie.strings[place]
        rows = [(index, row) for index, (number, row) in enumerate(self._rows) if lacking >> number & 1]
        if lacking.bit_count() > _EXACT:
            shortest = {number: min(map(len, self.phrases[number])) for number in {self._rows[i][0] for i, _ in rows}}
            whole = sum(shortest.values())
            return min(whole - shortest[self._rows[i][0]] + len(row) - _overlap(here, row) for i, row in rows)
        return min(
            len(row) - _overlap(here, row) + self.need((self._place_of[row], lacking & ~self._brings[index]))
            for index, row in rows
        )


def _overlap(left: Spelling, right: Spelling) -> int:
    """The most tokens that `left` ends with and `right` begins with, not all of `right`."""
    return next(n for n in range(min(len(left), len(right) - 1), -1, -1) if n == 0 or left[-n:] == right[:n])
