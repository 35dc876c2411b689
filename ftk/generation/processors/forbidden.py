"""What never comes: certain tokens, phrases, and runs of tokens that came before."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ftk.batch import sent
from ftk.generation.processors._ngrams import repeating_tokens
from ftk.generation.processors.base import FORBIDDEN, Processor, SearchState, index_of
from ftk.generation.processors.phrases import Spelling


class ForbiddenTokens(Processor):
    """Tokens that no answer may hold, end tokens among them if they are named.

    Args:
        first_unused: ids from here on are rows that only pad the vocabulary; none if None.
    """

    reads_answers = False

    def __init__(self, tokens: Iterable[int], first_unused: int | None = None) -> None:
        self.tokens = sorted(set(tokens))
        self.first_unused = first_unused
        self._indices: Tensor | None = None

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        if self._indices is None or self._indices.device != scores.device:
            self._indices = index_of(self.tokens, scores.device)
        scores.index_fill_(-1, self._indices, FORBIDDEN)
        if self.first_unused is not None:
            scores[..., self.first_unused :] = FORBIDDEN
        return scores


class ForbiddenPhrases(Processor):
    """Rows of tokens that no answer may hold: where all but its last token stand, the last is forbidden.

    Args:
        phrases: rows of token ids, none empty.
    """

    def __init__(self, phrases: Iterable[Spelling]) -> None:
        phrases = list(phrases)
        self._single = ForbiddenTokens(row[0] for row in phrases if len(row) == 1)
        self._last: dict[Spelling, list[int]] = {}
        for row in phrases:
            if len(row) > 1:
                self._last.setdefault(row[:-1], []).append(row[-1])
        self._lengths = sorted({len(row) for row in self._last})

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        scores = self._single(state, scores)
        if not self._last:
            return scores
        found = [
            (row.prompt, row.hypothesis, token)
            for row in state.open_rows()
            for length in self._lengths
            if length <= state.step
            for token in self._last.get(tuple(row.tokens[-length:]), ())
        ]
        if found:
            prompts, hypotheses, tokens = sent(torch.tensor(found), scores.device).unbind(-1)
            scores[prompts, hypotheses, tokens] = FORBIDDEN
        return scores


class NoRepeatNgram(Processor):
    """No n-gram stands in an answer twice (Paulus et al. 2018, 2.5).

    Args:
        size: n, at least 1.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        tokens = state.host_tokens
        num, width, step = tokens.shape
        rows, repeated = repeating_tokens(tokens.reshape(num * width, step), self.size)
        if len(rows):
            flat = scores.view(-1, scores.size(-1))
            flat[sent(torch.from_numpy(rows), scores.device), sent(torch.from_numpy(repeated), scores.device)] = (
                FORBIDDEN
            )
        return scores
