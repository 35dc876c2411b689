"""How far an answer has come with the phrases that it must hold: automata over tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

from ftk.generation.processors.phrases import PhraseTrie, Spelling

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
        # Behind each phrase the tokens of all others.
        self._behind = [*accumulate((_shortest(phrase) for phrase in reversed(self.phrases)), initial=0)][::-1][1:]
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
        if done == len(self.phrases):
            return 0
        begun = self._tries[done].begun(place)
        return self._behind[done] + min(len(row) - begun.get(n, 0) for n, row in enumerate(self.phrases[done]))


class UnorderedProgress(Progress):
    """Phrases in any order, which may overlap. A state is (place in the trie of all, bits of those lacking).

    What is needed is the shortest arrangement, each phrase overlapping with the one before it as far as it goes;
    for more than eight phrases that are lacking it is a bound: the rest of one, and all others whole.
    """

    def __init__(self, phrases: Sequence[Sequence[Spelling]]) -> None:
        super().__init__(phrases)
        self._phrase_of = [number for number, spellings in enumerate(self.phrases) for _ in spellings]
        self._trie = PhraseTrie(row for spellings in self.phrases for row in spellings)
        self._shortest = [_shortest(spellings) for spellings in self.phrases]
        self._brings: dict[int, int] = {}  # spelling -> bits of its own phrase, and of those that stand in it
        self._sums: dict[int, int] = {}  # bits of phrases -> tokens of them all
        self.start = (0, (1 << len(self.phrases)) - 1)

    def advance(self, state: tuple[int, int], token: int) -> tuple[int, int]:
        place, lacking = self._trie.advance(state[0], token), state[1]
        for row in self._trie.ending[place]:
            lacking &= ~(1 << self._phrase_of[row])
        return (place, lacking)

    def forget(self, state: tuple[int, int]) -> tuple[int, int]:
        return (0, state[1])

    def _need(self, state: tuple[int, int]) -> int:
        place, lacking = state
        if not lacking:
            return 0
        begun = {row: count for row, count in self._trie.begun(place).items() if lacking >> self._phrase_of[row] & 1}
        rows = self._trie.rows
        if lacking.bit_count() > _EXACT:
            gains = (n - len(rows[row]) + self._shortest[self._phrase_of[row]] for row, n in begun.items())
            return self._sum(lacking) - max([0, *gains])
        return min(
            len(row) - begun.get(index, 0) + self.need((self._trie.ends[index], lacking & ~self._brought(index)))
            for index, row in enumerate(rows)
            if lacking >> self._phrase_of[index] & 1
        )

    def _brought(self, row: int) -> int:
        if row not in self._brings:
            found = {self._phrase_of[node] for node in self._trie.within(self._trie.rows[row])}
            self._brings[row] = sum(1 << phrase for phrase in found)
        return self._brings[row]

    def _sum(self, lacking: int) -> int:
        if lacking not in self._sums:
            self._sums[lacking] = sum(n for phrase, n in enumerate(self._shortest) if lacking >> phrase & 1)
        return self._sums[lacking]


def fewest_tokens(phrases: Sequence[Sequence[Spelling]]) -> int:
    """A number of tokens that no answer with these phrases can do without, found in one pass over them.

    Of spellings of which none begins with another each begins at a token of its own.
    """
    phrase_of = [number for number, spellings in enumerate(phrases) for _ in spellings]
    trie = PhraseTrie(row for spellings in phrases for row in spellings)
    sharing = {number for row, number in enumerate(phrase_of) if trie.is_beginning(row)}
    return max(len(phrases) - len(sharing), *map(_shortest, phrases))


def _shortest(spellings: Sequence[Spelling]) -> int:
    return min(map(len, spellings))
