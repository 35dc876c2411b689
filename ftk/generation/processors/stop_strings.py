"""Texts and tokens at which an answer ends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torch import Tensor

from ftk.generation.processors.base import FORBIDDEN, Processor, SearchState, index_of

_MARGIN = 8  # tokens more than the longest stop string has bytes: the first tokens of a row may be read otherwise


class StopStrings(Processor):
    """Where an answer's text holds one of some strings it ends, and is cut off in front of the string.

    The text decides, not tokens: a string is found however it is cut into tokens, and a character whose bytes
    are spread over tokens counts when it is whole. The end that follows costs nothing: its score is 0.
    Asks the device for the tokens at every step.

    Args:
        stops: the strings, none empty.
        decode: from ids to text.
    """

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self.stops = tuple(stops)
        self.decode = decode
        self._window = max(len(stop.encode()) for stop in self.stops) + _MARGIN

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        if state.step:
            for row in state.open_rows():
                # Most answers hold none: a look at the last tokens, and at all of them only where it is there.
                if (
                    self._find(self.decode(row.tokens[-self._window :])) >= 0
                    and self._find(self.decode(row.tokens)) >= 0
                ):
                    own = scores[row.prompt, row.hypothesis]  # [V]
                    own.fill_(FORBIDDEN)
                    own[state.ends[0]] = 0.0
        return scores

    def length(self, number: int, tokens: Sequence[int]) -> int:
        """All tokens in front of the first stop string; where one token holds both, the whole string stays."""
        tokens = list(tokens)
        text = self.decode(tokens)
        cut = self._find(text)
        if cut < 0:
            return len(tokens)
        for count in range(len(tokens) + 1):
            begun = self.decode(tokens[:count])
            if begun == text[:cut] or self._find(begun) >= 0:
                return count
        return len(tokens)

    def cut(self, text: str) -> str:
        """The text in front of the first stop string; all of it if there is none."""
        cut = self._find(text)
        return text if cut < 0 else text[:cut]

    def settled(self, text: str) -> str:
        """The text in front of the first stop string, or of what at its end may become one."""
        cut = self._find(text)
        least = len(text) if cut < 0 else cut
        for stop in self.stops:
            # The longest beginning of the stop string that the text ends with.
            longest = min(len(stop) - 1, len(text))
            begun = next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
            least = min(least, len(text) - begun)
        return text[:least]

    def _find(self, text: str) -> int:
        """Where the first stop string begins; -1 if there is none."""
        return min((place for stop in self.stops if (place := text.find(stop)) >= 0), default=-1)


class StopTokens(Processor):
    """Ends an answer at one of these tokens and strips it. The end token that follows is forced, with score 0.

    Args:
        tokens: ids.
    """

    def __init__(self, tokens: Collection[int]) -> None:
        self.stop_tokens = frozenset(tokens)

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        if state.step:
            stops = index_of(sorted(self.stop_tokens), scores.device)
            stopped = (state.tokens[..., -1:] == stops).any(-1, keepdim=True)  # [N, W, 1]
            scores.masked_fill_(stopped, FORBIDDEN)
            scores[..., state.ends[0]].masked_fill_(stopped[..., 0], 0.0)
        return scores

    def length(self, number: int, tokens: Sequence[int]) -> int:
        """All tokens in front of the first stop token."""
        return next((place for place, token in enumerate(tokens) if token in self.stop_tokens), len(tokens))

    def settled(self, text: str) -> str:
        """All: the engine reports no stop token."""
        return text
