"""Shallow fusion: the log-probabilities of a model and of a language model are added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.engine.decoder import CachedDecoder, RequestSoFar
from ftk.generation.processors.base import index_of
from ftk.generation.search import Answer, Move
from ftk.generation.search.base import Fusion

if TYPE_CHECKING:
    from ftk.generation.engine.request import Frame, Request


class LanguageModel(Protocol):
    """A language model whose log-probabilities are added to the model's, and what it reads.

    Attributes:
        fusion: how its log-probabilities count.
    """

    model: Any
    fusion: Fusion

    def slots(self, request: Request) -> int:
        """Most tokens that it will have read before an answer."""

    def next(self, request: Request, answers: Sequence[Answer]) -> Frame:
        """What it reads, from the beginning, before each answer, the first one too."""


class FusedDecoder:
    """A decoder and that of a language model, row by row and hypothesis by hypothesis the same.

    Its logits have two parts side by side, [..., 2 V]: the model's own, and the log-probabilities of the language
    model. A search takes them apart again (`Search.scored`) and need not know of it where it picks rows and
    hypotheses.

    Args:
        other: of the language model, with as many rows and hypotheses.
        language_model: says what is read there, and how it counts.
    """

    def __init__(self, decoder: CachedDecoder, other: CachedDecoder, language_model: LanguageModel) -> None:
        self.decoder, self.other = decoder, other
        self.language_model = language_model
        self.fusion: Fusion | None = language_model.fusion
        self.models = (decoder.model, other.model)
        self.num_rows, self.width, self.device = decoder.num_rows, decoder.width, decoder.device
        self.prefix_capacity, self.branch_capacity = decoder.prefix_capacity, decoder.branch_capacity
        self.source_capacity = decoder.source_capacity
        self.observer, self.reused = decoder.observer, decoder.reused

    def read(
        self, rows: Sequence[int], frames: Sequence[Frame], asked: Sequence[RequestSoFar], spare: Sequence[int] = ()
    ) -> Tensor:
        others = [self.language_model.next(request, answers) for request, answers in asked]
        # First, since it reads from the beginning and so may read again, should the model fail.
        other = self.other.read(rows, others, (), spare)
        return self._joined(self.decoder.read(rows, frames, (), spare), other)

    def step(self, tokens: Tensor) -> Tensor:
        return self._joined(self.decoder.step(tokens), self.other.step(tokens))

    def reorder(self, sources: Tensor) -> None:
        self.decoder.reorder(sources)
        self.other.reorder(sources)

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        self.decoder.keep(row, tokens)
        self.other.keep(row, tokens)

    def leave(self, rows: Sequence[int]) -> None:
        self.decoder.leave(rows)
        self.other.leave(rows)

    def move(self, source: int, target: int) -> None:
        self.decoder.move(source, target)
        self.other.move(source, target)

    def abandon(self, rows: Sequence[int]) -> None:
        self.decoder.abandon(rows)
        self.other.abandon(rows)

    def wipe(self, rows: Sequence[int]) -> None:
        self.decoder.wipe(rows)
        self.other.wipe(rows)

    def _joined(self, logits: Tensor, other: Tensor) -> Tensor:
        if logits.size(-1) != other.size(-1):  # a module that does not say the size of its vocabulary
            raise UserError(
                f"the language model has a vocabulary of {other.size(-1)} tokens, the model one of {logits.size(-1)}; "
                "both must have been trained with the same tokenizer"
            )
        return torch.cat((logits.float(), other.float().log_softmax(-1)), dim=-1)


class LanguageModelRecord:
    """The language model's log-probabilities of the tokens that the hypotheses of a search have written.

    Looked up by the tokens themselves: equal beginnings of answers have equal continuations, however a strategy keeps
    its answers.

    Args:
        ends: tokens that end an answer; no hypothesis continues after them.
        device: of the log-probabilities.
    """

    def __init__(self, ends: Sequence[int], device: torch.device) -> None:
        self.ends = tuple(ends)
        self._ends = index_of(ends, device)
        self._tokens: Tensor | None = None  # int64 [N, W, step]: the hypotheses
        self._steps: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self._last: tuple[Tensor, Tensor] | None = (
            None  # hypotheses of the newest step, and all log-probabilities there
        )

    def add(self, logits: Tensor, move: Move) -> None:
        """One more step.

        Args:
            logits: [N, 1 or W, 2 V], as `FusedDecoder` gives them.
            move: of the search, given these.
        """
        logprobs = logits[..., logits.size(-1) // 2 :]  # [N, W', V]
        rows = torch.arange(logits.size(0), device=logits.device)[:, None]
        sources = move.sources
        if sources is None:
            width = move.tokens.size(1)
            sources = torch.arange(width, device=logits.device).clamp(max=logits.size(1) - 1).expand_as(move.tokens)
        before = logits.new_zeros(*logprobs.shape[:2], 0, dtype=torch.int64) if self._tokens is None else self._tokens
        self._tokens = torch.cat((before[rows, sources], move.tokens[..., None]), dim=-1)
        ends = logprobs[..., self._ends]  # [N, W', E]
        self._steps.append((before, ends, self._tokens, logprobs[rows, sources, move.tokens]))
        self._last = before, logprobs

    def keep(self, rows: Tensor) -> None:
        """Of the prompts only `rows`, int64 [R], stay, in this order."""
        self._tokens = None if self._tokens is None else self._tokens[rows]
        self._steps = [tuple(part[rows] for part in step) for step in self._steps]  # type: ignore[misc]
        self._last = None if self._last is None else (self._last[0][rows], self._last[1][rows])

    def given_to(self, answers: Sequence[Answer], place: int) -> list[Answer]:
        """The answers of the prompt at `place` with these log-probabilities; moves them to the host."""
        found: dict[tuple[int, ...], float] = {}
        for before, ends, tokens, values in ([part[place].tolist() for part in step] for step in self._steps):
            for beginning, own in zip(before, ends, strict=True):
                for end, value in zip(self.ends, own, strict=True):
                    found.setdefault((*beginning, end), value)
            for written, value in zip(tokens, values, strict=True):
                found.setdefault(tuple(written), value)
        return [replace(answer, lm_logprobs=self._looked_up(answer, found, place)) for answer in answers]

    def _looked_up(self, answer: Answer, found: dict[tuple[int, ...], float], place: int) -> list[float]:
        end = () if not answer.ended else (self.ends[0] if answer.end is None else answer.end,)
        whole = (*answer.tokens, *end)
        if whole not in found and self._last is not None:
            # An answer that was cut at the greatest length: its last token need not be among those that go on.
            before, logprobs = self._last
            found[whole] = float(logprobs[place, before[place].tolist().index(list(whole[:-1])), whole[-1]])
        return [found[whole[: step + 1]] for step in range(len(whole))]
