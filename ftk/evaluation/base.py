"""The interface of a scorer."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence

from ftk.config.choice import choice
from ftk.plugins import naming_mistakes, refuse
from ftk.registry import SCORERS, is_plugin, named


class Scorer(ABC):
    """Collects answers with the texts that are right, then computes one or more numbers over all of them."""

    @abstractmethod
    def add(self, answer: str, *references: str) -> None:
        """Takes one answer, and the texts that are right, at least one."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """Name -> value over all answers so far; shares are in percent. Empty if there were none."""

    def signature(self, num_references: Collection[int] = (1,)) -> str:
        """The settings that the numbers depend on, for result files; "" if there are none.

        Args:
            num_references: how many right texts an answer has; several numbers where that differs.
        """
        return ""


class SumScorer(Scorer):
    """A scorer whose numbers are functions of sums over answers, so that their standard errors can be found."""

    def __init__(self) -> None:
        self.sums: list[float] | None = None

    @abstractmethod
    def measure(self, answer: str, references: Sequence[str]) -> Sequence[float]:
        """What one answer adds to the sums.

        Args:
            references: the texts that are right, at least one.
        """

    @abstractmethod
    def values(self, sums: Sequence[float]) -> dict[str, float]:
        """Name -> value of the sums over one answer or more."""

    def add(self, answer: str, *references: str) -> None:
        added = self.measure(answer, references)
        before = self.sums if self.sums is not None else [0.0] * len(added)
        self.sums = [total + other for total, other in zip(before, added, strict=True)]

    def result(self) -> dict[str, float]:
        return {} if self.sums is None else self.values(self.sums)


def build_scorer(name: str) -> Scorer:
    """The registered scorer `name`, perhaps with options: `rouge stemmer=false`.

    Raises:
        UserError: there is no such scorer; lists those that exist.
    """
    scorer: Scorer = choice(name, SCORERS, "`scoring`").build()
    return scorer


def names_of(line: str) -> Mapping[str, float]:
    """The names of a scorer's numbers, with their values for one right answer.

    Args:
        line: as of `build_scorer`.

    Raises:
        UserError: it fails, or gives something else.
    """
    scorer = build_scorer(line)
    plain = contextlib.nullcontext()
    with naming_mistakes(f"{named(scorer)} fails on the answer 'a'") if is_plugin(scorer) else plain:
        scorer.add("a", "a")
        found = scorer.result()
    if not isinstance(found, Mapping):
        way = "values(sums)" if isinstance(scorer, SumScorer) else "result()"
        refuse(named(scorer), f"what {way} returns", found, "a dictionary, name -> number")
    return found
