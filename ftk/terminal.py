"""Text for terminals: tables in columns, times, and the width of progress bars."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TextIO

_WIDTH = 80  # columns, where a terminal reports none
_ROWS = 25


def bar_width(stream: TextIO) -> dict[str, Any]:
    """Options of a tqdm bar on `stream`: as wide as the terminal; with a reported size of 0 it would not be shown."""
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):  # no terminal
        columns = 0
    return {"dynamic_ncols": True} if columns else {"ncols": _WIDTH, "nrows": _ROWS}


def duration(seconds: float) -> str:
    """3725 -> 1:02:05."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


def in_columns(rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> list[str]:
    """The lines of a table.

    Args:
        rows: its cells, as many in each.
        left: columns that stand to the left; the others stand to the right.
    """
    rows = [*rows]
    widths = [max(map(display_width, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            pad(cell, width, column in left) for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def display_width(text: str) -> int:
    """Columns of a terminal that a text takes: two for wide (Chinese, ...) characters, none for combining marks."""
    columns = 0
    for character in text:
        if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me"):
            continue
        columns += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return columns


def pad(text: str, width: int, left: bool = True) -> str:
    """The text with spaces up to a number of columns, behind it or, not `left`, before it."""
    spaces = " " * (width - display_width(text))
    return text + spaces if left else spaces + text
