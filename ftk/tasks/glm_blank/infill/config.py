"""The options of filling blanks: those of every generation, and which blank is filled when; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ftk.config.options import option
from ftk.generation.config import GenerationConfig


@dataclass(kw_only=True)
class BlankConfig:
    """In which order blanks are filled, and what is read of a text and its answers."""

    group_title: ClassVar[str] = "blanks"

    blank_order: str = option(
        "left",
        "which blank is filled first: left (to right), confident (the one that begins most surely), or numbers from 1 "
        "on such as 3,1 (these first, then the others from left to right)",
    )
    reencode: bool = option(
        False, "each answer takes its blank's place and the text is read again; else answers stay after it"
    )
    truncate: str = option(
        "error",
        "prompts longer than the model's positions: an error, or cut at the left, the right, or both sides (middle) "
        "as far as the blanks",
        choices=("error", "left", "right", "middle"),
    )
    misspelt_blanks: str = option(
        "refuse",
        "prompts with what is nearly a blank, [mask], <mask>, 【MASK】: refused, or read as text",
        choices=("refuse", "text"),
    )

    nbest_over: str = option(
        "blank",
        "the n best answers to each blank, given the best ones to those before it, or the n best ways to fill the "
        "text as a whole: beams are carried from blank to blank",
        choices=("blank", "text"),
    )

    def validate(self) -> Iterator[str]:
        if self.blank_order not in ("left", "confident"):
            numbers = [number.strip() for number in self.blank_order.split(",")]
            if not all(number.isdecimal() and len(number) < 10 and int(number) > 0 for number in numbers):
                yield f"blank_order is {self.blank_order!r}; it is left, confident, or numbers from 1 on, e.g. 2,1,3"
            elif len({int(number) for number in numbers}) < len(numbers):
                yield f"blank_order is {self.blank_order!r}; it names a blank twice"


@dataclass(kw_only=True)
class FillConfig(GenerationConfig, BlankConfig):
    """How answers to blanks are searched for. Greedy unless `beam` is above 1 or `sampling` is on."""

    of_scores: ClassVar[tuple[str, ...]] = (*GenerationConfig.of_scores, "truncate", "misspelt_blanks")
    of_prompts: ClassVar[tuple[str, ...]] = ("truncate", "misspelt_blanks")

    def validate(self) -> Iterator[str]:
        found = list(super().validate())
        yield from found
        # Where something else is wrong with these, one message is enough.
        if self.nbest_over == "text" and self.blank_order == "confident" and self.beam > 1 and not found:
            yield "nbest_over is text, whose beams compare answers to the same blanks; name the blank_order"

    @classmethod
    def groups(cls) -> tuple[Any, ...]:
        return (*super().groups(), BlankConfig)

    @classmethod
    def users(cls) -> dict[str, tuple[str, ...]]:
        users = super().users()
        return {**users, "nbest_over": users["nbest"]}
