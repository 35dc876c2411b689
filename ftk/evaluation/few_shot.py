"""Answered examples in front of a question (few-shot; Brown et al. 2020)."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Generic, Protocol, TypeVar

from ftk.config.options import option
from ftk.errors import UserError, counted

DRAWN, FIRST = "drawn", "first"

SEPARATOR = "\n\n"
"""What stands behind each example."""


class HasPlace(Protocol):
    """What is at a place of a file."""

    @property
    def place(self) -> str: ...


T = TypeVar("T", bound=HasPlace)


def fewshot_choice_option(**given: Any) -> Any:
    """The field of the option `fewshot_choice`."""
    return option(
        DRAWN,
        "drawn: examples of its own for each question; first: the first rows for all, as MMLU and C-Eval are asked, "
        "which causal models read once",
        choices=(DRAWN, FIRST),
        **given,
    )


@dataclass(kw_only=True)
class FewShotConfig:
    num_fewshot: int = option(0, "answered rows in front of each question", min=0, unit="rows")
    fewshot_data: str | None = option(None, "the file that they are drawn from: that of the training rows", path=True)
    fewshot_choice: str = fewshot_choice_option()
    fewshot_seed: int = option(1, "the examples of a question that are drawn depend on this and its number alone")

    def validate(self) -> Iterator[str]:
        if (self.num_fewshot > 0) != (self.fewshot_data is not None):
            yield "num_fewshot and fewshot_data go together: how many answered rows, and the file they are drawn from"

    def few_shot(self) -> dict[str, Any]:
        """These options for the file of results, where they are used."""
        return {field.name: getattr(self, field.name) for field in fields(FewShotConfig) if self.num_fewshot}


class Examples(Generic[T]):
    """What examples are drawn from.

    Args:
        config: how many, and the seed.
        pool: answered rows or questions.

    Raises:
        UserError: they are too few.
    """

    def __init__(self, config: FewShotConfig, pool: Sequence[T]) -> None:
        self.config, self.pool = config, pool
        self._rows = [_row(example.place) for example in pool]
        self._known = {*self._rows}
        self._refuse_too_few(len(self._known))

    def of(self, number: int, place: str) -> list[T]:
        """The examples of a question, the last one nearest to it; none is from the question's own row.

        Raises:
            UserError: they are too few.
        """
        pool, own = self.pool, _row(place)
        if own in self._known:
            self._refuse_too_few(len(self._known) - 1, f" besides that of {place}")
            pool = [example for example, row in zip(pool, self._rows, strict=True) if row != own]
        if self.config.fewshot_choice == FIRST:
            return [*pool[: self.config.num_fewshot]]
        return random.Random(f"{self.config.fewshot_seed} {number}").sample(pool, self.config.num_fewshot)

    def _refuse_too_few(self, count: int, besides: str = "") -> None:
        if count < self.config.num_fewshot:
            found = f"{self.config.fewshot_data} has {counted(count, 'row')} with an answer{besides}"
            raise UserError(f"`num_fewshot` {self.config.num_fewshot}: {found}")


def _row(place: str) -> tuple[str, str]:
    """The file of a place, however its path is written, and the line."""
    file, _, line = place.rpartition(":")
    return os.path.realpath(file), line


def num_fitting(lengths: Sequence[int], room: int) -> int:
    """For how many examples of these numbers of tokens there is room, from the last one on."""
    return sum(used <= room for used in itertools.accumulate(reversed(lengths)))
