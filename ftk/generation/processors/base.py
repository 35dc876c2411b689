"""What steers a search: processors, which change the scores of the next tokens before one is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ftk.batch import sent

FORBIDDEN = float("-inf")
LAST_RESORT = -1e4  # of a token that must come, where the model itself gives it no probability at all


@dataclass
class SearchState:
    """A search before its next token is chosen: N prompts, W hypotheses of each (1 at the first step).

    Attributes:
        tokens: int64 [N, W, step], the answers so far. The tokens of a row after its end have no meaning.
        contexts: per prompt its token ids.
        numbers: per prompt the number of the answer that is being written, from 0 on.
        ends: ids of the tokens that end an answer.
        max_len: longest answer, in tokens.
        logits: float32 [N, W, V], the model's own, never to be changed.
        logprobs: float32 [N, W, V], their logarithms of probabilities, never to be changed.
        unprocessed: float32 [N, W, V], the scores before any processor, never to be changed: logprobs if None, else
            with a language model's part.
        end_index: `ends` where the scores are, int64 [E]; made of these if None.
        early: places of prompts whose answers must not end yet.
        steps, max_lens: per prompt the tokens of its answer, and the most that it may have. Where prompts differ, which
            only a processor with `reads_answers` False ever sees, `tokens` and `max_len` are those of none.
    """

    tokens: Tensor
    contexts: Sequence[Sequence[int]]
    numbers: Sequence[int]
    ends: tuple[int, ...]
    max_len: int
    logits: Tensor
    logprobs: Tensor
    unprocessed: Tensor = None  # type: ignore[assignment] # `logprobs`, see below
    end_index: Tensor = None  # type: ignore[assignment] # made of `ends`, see below
    early: Sequence[int] = ()
    steps: Sequence[int] = ()
    max_lens: Sequence[int] = ()
    _host_tokens: npt.NDArray[np.int64] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.unprocessed is None:
            self.unprocessed = self.logprobs
        if self.end_index is None:
            self.end_index = index_of(self.ends, self.logprobs.device)

    @property
    def step(self) -> int:
        """Tokens that every answer has so far."""
        return self.tokens.size(-1)

    @property
    def host_tokens(self) -> npt.NDArray[np.int64]:
        """`tokens` as an array [N, W, step] on the host, fetched once however many processors ask."""
        if self._host_tokens is None:
            self._host_tokens = np.ascontiguousarray(self.tokens.cpu().numpy())
        return self._host_tokens

    def fresh_scores(self) -> Tensor:
        """float32 [N, W, V]: `unprocessed`, without an end where it is `early`; a copy, that processors may change."""
        return forbid_ends(self.unprocessed.clone(), self.early, self.end_index)

    def of_prompts(self, places: Sequence[int], rows: Tensor) -> SearchState:
        """The part of R prompts whose answers are as long: their places here, and the same as an index, int64 [R]."""
        step, max_len = (self.steps[places[0]], self.max_lens[places[0]]) if self.steps else (None, self.max_len)
        return SearchState(
            self.tokens[rows, :, :step],
            [self.contexts[row] for row in places] if self.contexts else (),
            [self.numbers[row] for row in places] if self.numbers else (),
            self.ends,
            max_len,
            self.logits[rows],
            self.logprobs[rows],
            self.unprocessed[rows],
            self.end_index,
            [place for place, row in enumerate(places) if row in self.early],
        )

    def open_rows(self) -> Iterator[Row]:
        """The hypotheses without an end token, one after the other, on the host."""
        ends = set(self.ends)
        for prompt, hypotheses in enumerate(self.host_tokens.tolist()):
            for hypothesis, tokens in enumerate(hypotheses):
                if ends.isdisjoint(tokens):
                    yield Row(prompt, hypothesis, tokens)


class Row(NamedTuple):
    """One hypothesis on the host: its prompt, its place there, and its tokens so far."""

    prompt: int
    hypothesis: int
    tokens: list[int]


class Processor:
    """Changes the scores of the next tokens. A subclass says how in `__call__`.

    It is called once for each token, must not depend on what else is in the batch, and best keeps no state of
    its own: `SearchState` has all that it needs. One that keeps something per hypothesis overrides `reorder`
    and `keep`.
    """

    reads_answers: ClassVar[bool] = True
    """Whether what it does depends on the answers so far, their number or length. A class says so for itself alone."""

    stop_tokens: frozenset[int] = frozenset()
    """Tokens that end an answer, in addition to the model's end tokens; `length` does not count them."""

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        """The changed scores.

        Args:
            state: the search so far.
            scores: float32 [N, W, V], log-probabilities as changed so far; -inf forbids. May be changed in place.

        Returns:
            float32 [N, W, V].
        """
        raise NotImplementedError

    def reorder(self, sources: Tensor) -> None:
        """Hypothesis w of prompt n now continues the one that was at sources[n, w]: int64 [N, W]."""

    def keep(self, rows: Tensor) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order."""

    def select(self, totals: Tensor, width: int, count: int) -> list[list[int]] | None:
        """Which continuations a beam search is to choose from, behind `__call__` of the same step.

        Args:
            totals: [N, W, V], the scores of whole answers with their next token; -inf: forbidden.
            width: hypotheses that are to go on.
            count: how many candidates are usual.

        Returns:
            per prompt indices into [W * V], in the order in which they count as the best; None: the best by score.
        """
        return None

    def length(self, number: int, tokens: Sequence[int]) -> int:
        """How many tokens of a found answer count; the others are cut off. All, unless it is a stop string's.

        Args:
            tokens: the answer, without its end token.
        """
        return len(tokens)

    def cut(self, text: str) -> str:
        """What counts of the text of a found answer: all, unless a stop string is in it."""
        return text

    def settled(self, text: str) -> str:
        """The part of the text of an unfinished answer that `cut` will leave, whatever follows: for streaming."""
        return "" if self.cuts else text

    @property
    def cuts(self) -> bool:
        """Whether less of an answer may count than was found."""
        return any(getattr(type(self), name) is not getattr(Processor, name) for name in ("cut", "length"))


class Processors(Processor):
    """Processors one after the other. Where they leave a hypothesis nothing, the end tokens are allowed.

    Args:
        items: in the order in which they are applied; `build_processors` gives ftk's own in theirs.
    """

    def __init__(self, items: Sequence[Processor] = ()) -> None:
        self.items = tuple(items)
        self.stop_tokens = frozenset().union(*(item.stop_tokens for item in self.items))

    def __bool__(self) -> bool:
        return bool(self.items)

    @property
    def reads_answers(self) -> bool:  # type: ignore[override]
        return any(vars(type(item)).get("reads_answers", True) for item in self.items)

    @property
    def keeps_state(self) -> bool:
        """Whether one of them keeps something about hypotheses, so that each search needs its own."""
        names = ("reorder", "keep")
        return any(getattr(type(item), name) is not getattr(Processor, name) for item in self.items for name in names)

    def __call__(self, state: SearchState, scores: Tensor) -> Tensor:
        for item in self.items:
            scores = item(state, scores)
        return with_a_way_out(state, scores)

    def reorder(self, sources: Tensor) -> None:
        for item in self.items:
            item.reorder(sources)

    def keep(self, rows: Tensor) -> None:
        for item in self.items:
            item.keep(rows)

    def select(self, totals: Tensor, width: int, count: int) -> list[list[int]] | None:
        """That of the first item that selects any."""
        found = (item.select(totals, width, count) for item in self.items)
        return next((one for one in found if one is not None), None)

    @property
    def cuts(self) -> bool:
        return any(item.cuts for item in self.items)

    def length(self, number: int, tokens: Sequence[int]) -> int:
        return min((item.length(number, tokens) for item in self.items), default=len(tokens))

    def cut(self, text: str) -> str:
        for item in self.items:
            text = item.cut(text)
        return text

    def settled(self, text: str) -> str:
        for item in self.items:
            text = item.settled(text)
        return text


def forbid_ends(scores: Tensor, early: Sequence[int], ends: Tensor) -> Tensor:
    """Scores [N, W, V] without end tokens, int64 [E], for the prompts at these places; in place."""
    if len(early) == len(scores):
        return scores.index_fill_(-1, ends, FORBIDDEN)
    if early:
        scores[index_of(early, scores.device)[:, None], :, ends] = FORBIDDEN
    return scores


def with_a_way_out(state: SearchState, scores: Tensor) -> Tensor:
    """scores [N, W, V], in which a row that is -inf throughout gets its end tokens back; in place."""
    # amax: one pass, and NaN, a broken model, is not taken for stuck.
    stuck = (scores.amax(-1) == FORBIDDEN)[..., None]  # [N, W, 1]
    ends = state.end_index
    scores[..., ends] = torch.where(stuck, _end_scores(state), scores[..., ends])
    return scores


def end_only(state: SearchState) -> Tensor:
    """Scores [N, W, V] that allow nothing but the end tokens, each with its own score."""
    scores = torch.full_like(state.logprobs, FORBIDDEN)
    scores[..., state.end_index] = _end_scores(state)
    return scores


def keep_only(state: SearchState, scores: Tensor, row: Row, tokens: Sequence[int]) -> None:
    """Allows a hypothesis nothing but these tokens, which have their scores before any processor; in place."""
    kept = index_of(tokens, scores.device)
    own = scores[row.prompt, row.hypothesis]  # [V]
    own.fill_(FORBIDDEN)
    own[kept] = state.unprocessed[row.prompt, row.hypothesis, kept].clamp(min=LAST_RESORT)


def index_of(values: Sequence[int], device: torch.device) -> Tensor:
    """Numbers from the host as int64 [n]. A tensor that is made on a GPU at once waits for all that it has to do."""
    return sent(torch.tensor(values, dtype=torch.int64), device)


def _end_scores(state: SearchState) -> Tensor:
    """[N, W, E]"""
    return state.unprocessed[..., state.end_index].clamp(min=LAST_RESORT)  # clamp lets NaN through
