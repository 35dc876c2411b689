"""The interface of a scorer."""

from __future__ import annotations

from abc import ABC, abstractmethod

from ftk.config.choice import choice
from ftk.registry import SCORERS


class Scorer(ABC):
    """Collects pairs of answer and reference, then computes one or more numbers over all of them."""

    @abstractmethod
    def add(self, answer: str, reference: str) -> None:
        """Takes one answer and the text that was expected."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """Name -> value over all pairs so far; shares are in percent. Empty if there were no pairs."""


def build_scorer(name: str) -> Scorer:
    """The registered scorer `name`, with its default options.

    Raises:
        UserError: there is no such scorer; lists those that exist.
    """
    scorer: Scorer = choice(name, SCORERS, "`scoring`").build()
    return scorer
