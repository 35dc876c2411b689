"""Independent hypotheses: each continues from its own last token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ftk.errors import UserError
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors, index_of
from ftk.generation.search.answer import Answer
from ftk.generation.search.base import Lines, Move, Search, SearchTask, Span, joined
from ftk.plugins import refuse
from ftk.registry import is_plugin, named


class IndependentSearch(Search):
    """`nbest` hypotheses per prompt, each on its own; a subclass chooses the next token of each.

    Attributes:
        joins: whether prompts of another search can be added, which began at another step and have other limits. A
            class says so for itself alone: one derived from it may keep more, or count steps.
    """

    joins: ClassVar[bool] = False

    def __init__(
        self, config: GenerationConfig, task: SearchTask, processors: Processors | None = None, options: Any = None
    ) -> None:
        super().__init__(config, task, processors, options)
        self.lines = Lines(task, self.width(config), config.max_len)
        self._is_plugins = is_plugin(self)
        self._starts: tuple[Sequence[Span], Tensor] | None = None  # of the spans, once they differ

    @staticmethod
    def width(config: GenerationConfig, options: Any = None) -> int:
        return config.nbest

    @abstractmethod
    def choose(self, scores: Tensor) -> Tensor:
        """The next token of each hypothesis: processed scores float32 [N, W, V] -> int64 [N, W]."""

    def _advance(self, scores: Tensor, logprobs: Tensor) -> Move:
        width = self.lines.tokens.size(1)
        tokens = self.choose(scores.expand(-1, width, -1))  # [N, W]; 1 -> W at first
        if self._is_plugins:
            self._check_choice(tokens, scores.expand(-1, width, -1))
        own = logprobs.expand(-1, width, -1).gather(-1, tokens[:, :, None])[:, :, 0]
        processed = own
        if scores is not logprobs:
            processed = scores.expand(-1, width, -1).gather(-1, tokens[:, :, None])[:, :, 0]
        self.lines.write(self.place(), tokens, processed, own, self.ends)
        return Move(tokens, None)

    def _check_choice(self, tokens: Any, scores: Tensor) -> None:
        """Refuses what `choose` must not answer to scores [N, W, V]; the host waits for the device."""
        who, what, (count, width, size) = named(self), "what choose returns", scores.shape
        if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.shape != (count, width):
            refuse(who, what, tokens, f"int64 [{count}, {width}], the next token of each hypothesis")
        wrong = (tokens < 0) | (tokens >= size)
        if wrong.any():
            raise UserError(f"{who}: {what} holds {int(tokens[wrong][0])}; tokens are from 0 to {size - 1}")
        chosen = scores.gather(-1, tokens[:, :, None])[:, :, 0]
        # Of a model with NaN the greatest is not finite either: the engine says so.
        impossible = ~chosen.isfinite() & scores.amax(-1).isfinite() & ~self.lines.ended
        if impossible.any():
            token = int(tokens[impossible][0])
            raise UserError(f"{who}: {what} holds {token}, whose score is -inf; it must choose one that is possible")

    def place(self) -> int | Tensor:
        """Number of the next token of each answer: one for all, or int64 [N] where they began at different steps."""
        spans = self.task.spans
        if len({span.start for span in spans}) <= 1:
            return self.step - (spans[0].start if spans else 0)
        if self._starts is None or self._starts[0] is not spans:
            self._starts = spans, index_of([span.start for span in spans], self.task.device)
        return self.step - self._starts[1]

    def is_open(self) -> bool:
        """Whether `join` may be called."""
        return vars(type(self)).get("joins", False) and not self.config.alternatives and self.task.fusion is None

    def join(self, other: IndependentSearch) -> None:
        """Adds the prompts of another search with the same options but for lengths; `task.spans` is the caller's."""
        self.lines.join(other.lines)
        uniforms = self.task.uniforms
        if uniforms is not None and other.task.uniforms is not None:
            uniforms = joined(uniforms, other.task.uniforms, 1)
        count = self.task.num_prompts + other.task.num_prompts
        self.task = self.task._replace(num_prompts=count, uniforms=uniforms)

    def finished(self) -> Tensor:
        return self.lines.ended.all(-1)

    def answers(self) -> list[list[Answer]]:
        return self.lines.answers(self.config.length_penalty)

    def answers_of(self, places: Sequence[int]) -> list[list[Answer]]:
        if type(self).answers is not IndependentSearch.answers:
            return super().answers_of(places)
        return self.lines.answers(self.config.length_penalty, places)

    def tokens_so_far(self) -> Tensor:
        spans = self.task.spans
        return self.lines.tokens[:, :, : self.step - min((span.start for span in spans), default=0)]

    def newest(self) -> Tensor | None:
        several = self.lines.tokens.size(1) > 1  # which of them is the best is known at the end
        return None if several else self.lines.newest(self.place() - 1)

    def keep(self, rows: Tensor) -> None:
        self.keep_task(rows)
        longest = max((span.max_len for span in self.task.spans), default=self.config.max_len)
        self.lines.keep(rows, longest)
        if self.task.uniforms is not None:
            self.task = self.task._replace(uniforms=self.task.uniforms[:, :longest])
