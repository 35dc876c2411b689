"""Independent hypotheses: each continues from its own last token."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors
from ftk.generation.search.base import Answer, Lines, Move, Search, Task


class IndependentSearch(Search):
    """`nbest` hypotheses per prompt, each on its own; a subclass chooses the next token of each."""

    def __init__(
        self, config: GenerationConfig, task: Task, processors: Processors | None = None, options: Any = None
    ) -> None:
        super().__init__(config, task, processors, options)
        self.lines = Lines(task, self.width(config), config.max_len)

    @staticmethod
    def width(config: GenerationConfig, options: Any = None) -> int:
        return config.nbest

    @abstractmethod
    def choose(self, scores: Tensor) -> Tensor:
        """The next token of each hypothesis: processed scores float32 [N, W, V] -> int64 [N, W]."""

    def _advance(self, scores: Tensor, logprobs: Tensor) -> Move:
        width = self.lines.tokens.size(1)
        tokens = self.choose(scores.expand(-1, width, -1))  # [N, W]; 1 -> W at first
        own = logprobs.expand(-1, width, -1).gather(-1, tokens[:, :, None])[:, :, 0]
        processed = own
        if scores is not logprobs:
            processed = scores.expand(-1, width, -1).gather(-1, tokens[:, :, None])[:, :, 0]
        self.lines.write(self.step, tokens, processed, own, self.ends)
        return Move(tokens, None)

    def finished(self) -> Tensor:
        return self.lines.ended.all(-1)

    def answers(self) -> list[list[Answer]]:
        return self.lines.answers(self.config.length_penalty)

    def tokens_so_far(self) -> Tensor:
        return self.lines.tokens[:, :, : self.step]

    def newest(self) -> Tensor | None:
        several = self.lines.tokens.size(1) > 1  # which of them is the best is known at the end
        return None if several else self.lines.newest(self.step - 1)

    def keep(self, rows: Tensor) -> None:
        self.keep_task(rows)
        self.lines.keep(rows)
