"""Which rows of a table run before each commit, and which in the slow tier alone (see scripts/test.sh)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_but(quick: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """The rows for `pytest.mark.parametrize`; those that are not in `quick` are marked slow."""
    return [row if row in quick else pytest.param(*_values(row), marks=pytest.mark.slow) for row in rows]


def wants_slow(request: pytest.FixtureRequest) -> bool:
    """Whether a slow test of the asking module is run, so that what a fixture makes for all of them is complete."""
    items = [item for item in request.session.items if item.path == request.node.path]
    return any(item.get_closest_marker("slow") is not None for item in items)


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
