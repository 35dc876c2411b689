"""How an answer must begin, and which tokens a caller's function allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from ftk.errors import UserError
from ftk.generation.processors.base import FORBIDDEN, Processor, Row, SearchState, index_of, keep_only
from ftk.generation.processors.phrases import Spelling

AllowedTokensFunction = Callable[[list[int], int, list[int]], Iterable[int] | None]


class ForcedPrefix(Processor):
    """An answer begins with one of some rows of tokens; which of them is left to the search.

    The tokens keep their log-probabilities, also where another processor has forbidden them. Behind the prefix
    the answer is free; if one row begins with another, either of them will do.

    Args:
        prefixes: number of the answer -> the rows, none empty; under -1 those of all answers that are not named.
    """

    def __init__(self, prefixes: Mapping[int, Sequence[Spelling]]) -> None:
        self.prefixes = dict(prefixes)

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        if state.step >= max((len(row) for rows in self.prefixes.values() for row in rows), default=0):
            return scores
        for row in state.open_rows():
            allowed = self._allowed(state.numbers[row.prompt], row)
            if allowed:
                keep_only(state, scores, row, sorted(allowed))
        return scores

    def _allowed(self, number: int, row: Row) -> set[int]:
        """The tokens that go on with a row; none where the prefix is complete, or not there at all."""
        rows = self.prefixes.get(number, self.prefixes.get(-1, ()))
        length = len(row.tokens)
        if any(tuple(row.tokens[: len(prefix)]) == prefix for prefix in rows):
            return set()
        return {prefix[length] for prefix in rows if len(prefix) > length and prefix[:length] == tuple(row.tokens)}


class AllowedTokens(Processor):
    """A function says which tokens may come next, as the `prefix_allowed_tokens_fn` of other libraries does.

        AllowedTokens(lambda context, number, tokens: digits if len(tokens) < 4 else ends)

    Args:
        allowed: gets the prompt's ids, the number of the answer and its tokens so far; gives the ids that may come
            next, end tokens included, or None for all of them. Where it gives none the answer ends. It must not
            depend on anything else, or an answer would depend on its batch.
    """

    def __init__(self, allowed: AllowedTokensFunction) -> None:
        self.allowed = allowed

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        for row in state.open_rows():
            tokens = self.allowed(list(state.contexts[row.prompt]), state.numbers[row.prompt], row.tokens)
            if tokens is None:
                continue
            ids = sorted({int(token) for token in tokens})
            for token in ids[:1] + ids[-1:]:
                if not 0 <= token < scores.size(-1):
                    raise UserError(f"allowed_tokens gave {token}; tokens are 0 to {scores.size(-1) - 1}")
            kept = index_of(ids, scores.device)
            own = scores[row.prompt, row.hypothesis]  # [V]
            values = own[kept]
            own.fill_(FORBIDDEN)
            own[kept] = values
        return scores
