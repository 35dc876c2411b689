"""Options as dataclass fields with the interval in which their values lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any


def option(default: Any, help: str, within: str | None = None, *, count: int | None = None, **metadata: Any) -> Any:
    """A field of a `Checked` dataclass.

    Args:
        default: its value where none is given; of a list a copy.
        help: for --help.
        within: where a number, or each number of a list, lies: an interval such as "(0, 1]" or "[0, inf)".
        count: how many numbers a list has.
        metadata: "unit", "choices" and what else an option may have (`ftk.config.options`).
    """
    metadata |= {"help": help, "within": within, "count": count}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


class Checked:
    """A dataclass of options whose numbers lie in the intervals of their fields."""

    def validate(self) -> Iterator[str]:
        """A message for each value that does not, which begins with the name of its field."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value, interval, count = (
                getattr(self, field.name),
                field.metadata.get("within"),
                field.metadata.get("count"),
            )
            numbers = value if isinstance(value, list) else [value]
            wrong_count = count is not None and len(numbers) != count
            if interval and (wrong_count or not all(_lies_in(interval, number) for number in numbers)):
                yield f"{field.name} is {value}; it must be {'two numbers ' if count == 2 else ''}{_words(interval)}"


def _lies_in(interval: str, number: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = number >= low if interval[0] == "[" else number > low
    return above and (number <= high if interval[-1] == "]" else number < high)


def _words(interval: str) -> str:
    low, high = interval[1:-1].split(", ")
    if high == "inf":
        return f"{low} or more" if interval[0] == "[" else f"above {low}"
    return f"below {high}" if low == "-inf" else f"in {interval}"
