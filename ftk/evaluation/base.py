"""The interface of a scorer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

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

    def signature(self) -> str:
        """What the numbers depend on besides the texts, for records of results; "" where there is nothing to say."""
        return ""


class SumScorer(Scorer):
    """A scorer whose numbers are functions of sums over answers, so that their standard errors can be found."""

    def __init__(self) -> None:
        self.sums: list[float] | None = None

    @abstractmethod
    def measure(self, answer: str, references: Sequence[str]) -> Sequence[float]:
        """What one answer adds to the sums.

        Args:
            answer: a text.
            references: the texts that are right, at least one.
        """

    @abstractmethod
    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """Name -> value of the sums over one answer or more."""

    def add(self, answer: str, reference: str) -> None:
        added = self.measure(answer, [reference])
        before = self.sums if self.sums is not None else [0.0] * len(added)
        self.sums = [one + other for one, other in zip(before, added, strict=True)]

    def result(self) -> dict[str, float]:
        return {} if self.sums is None else self.values(self.sums)


class MeanScorer(SumScorer):
    """Mean over answers of a number in [0, 1], in percent; of several references the one that fits best counts."""

    name: ClassVar[str] = ""

    @abstractmethod
    def score(self, answer: str, reference: str) -> float:
        """The number of one pair."""

    def measure(self, answer: str, references: Sequence[str]) -> Sequence[float]:
        return [max(float(self.score(answer, reference)) for reference in references), 1.0]

    def values(self, sums: Sequence[float]) -> dict[str, float]:
        total, count = sums
        return {self.name: 100.0 * total / count}


def build_scorer(name: str) -> Scorer:
    """The registered scorer `name`, perhaps with options: `rouge stemmer=false`.

    Raises:
        UserError: there is no such scorer; lists those that exist.
    """
    scorer: Scorer = choice(name, SCORERS, "`scoring`").build()
    return scorer
