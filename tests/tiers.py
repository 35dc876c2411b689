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
    return any(item.get_closest_marker("slow") is not None for item in selected_items(request))


def selected_items(request: pytest.FixtureRequest) -> list[Any]:
    """The tests of the asking module that are run, so that a fixture makes no more for them than they use."""
    return [item for item in request.session.items if item.path == request.node.path]


def values_of(request: pytest.FixtureRequest, parameter: str) -> set[Any]:
    """Those of a parameter of these tests."""
    given = [test.callspec.params for test in selected_items(request) if hasattr(test, "callspec")]
    return {parameters[parameter] for parameters in given if parameter in parameters}


def _values(row: Any) -> tuple[Any, ...]:
    return row if isinstance(row, tuple) else (row,)
