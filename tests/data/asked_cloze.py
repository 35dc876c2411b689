"""Questions of cloze tasks about rows, and how tests write them."""

from __future__ import annotations

from typing import Any

from ftk.data.supervised.cloze import ClozeQuestion
from ftk.data.supervised.cloze_files import load_cloze
from ftk.data.supervised.row import Row


def rows_of(*values: dict[str, Any]) -> list[Row]:
    return [Row(value, "rows.jsonl", line) for line, value in enumerate(values, start=1)]


def asked(name: str, *values: dict[str, Any], pattern: int | None = None, train: bool = False) -> list[ClozeQuestion]:
    return load_cloze(name).questions(rows_of(*values), pattern, train)


def spelled(question: ClozeQuestion, number: int = 0) -> str:
    """The text for a candidate, in the notation of `PATTERNS`."""
    before, behind = (
        [("≈" if part.second else "~") * part.shorten + part.text for part in half] for half in question.text_of(number)
    )
    return "·".join([*before, "[]", *behind])
