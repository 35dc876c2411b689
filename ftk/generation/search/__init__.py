"""Search strategies, one a file; `strategy` finds the one that the options ask for."""

from __future__ import annotations

from typing import Any, NamedTuple

from ftk.config.choice import choice
from ftk.generation.config import GenerationConfig
from ftk.generation.processors.base import Processors
from ftk.generation.search.answer import Answer
from ftk.generation.search.base import Move, Search, SearchTask, not_finite
from ftk.registry import SEARCHES

__all__ = ["Answer", "Move", "Search", "Strategy", "SearchTask", "not_finite", "strategy"]


class Strategy(NamedTuple):
    """A search class with the options it is built with.

    Attributes:
        options: the strategy's own options; None where it has none.
    """

    target: type[Search]
    config: GenerationConfig
    options: Any = None

    @property
    def width(self) -> int:
        """W, hypotheses per prompt."""
        return self.target.width(self.config, self.options)

    @property
    def num_steps(self) -> int:
        """How often `advance` is called at most: once for each token, and for what is read ahead."""
        return self.config.max_len + self.target.lookahead

    def draws(self, num_ends: int) -> int:
        """Random numbers that a step takes for each prompt."""
        return self.target.draws(self.config, num_ends)

    def build(self, task: SearchTask, processors: Processors | None = None) -> Search:
        """One search for the prompts of `task`."""
        if self.options is None:
            return self.target(self.config, task, processors)
        return self.target(self.config, task, processors, self.options)


def strategy(config: GenerationConfig) -> Strategy:
    """The strategy that the options ask for, with its own options read and checked.

    Raises:
        UserError: no such strategy, or an option that it does not take.
    """
    chosen = choice(config.search or config.strategy, SEARCHES, "`search`")
    chosen.entry.check(chosen.entry.target)
    return Strategy(chosen.entry.target, config, chosen.config)  # type: ignore[arg-type]
