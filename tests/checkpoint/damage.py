"""What readers of other programs' files must refuse, or read without running it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


class Made:
    """Unpickled by a call, and by a state that the result is given."""

    def __init__(self, *reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


EVIL = Made(Path.touch, (Path("evil_was_here"),))
"""Leaves a file in the working folder where it is unpickled."""


def made_by(package: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Made, list[str]]:
    """What a function of a package makes when it is unpickled, and the calls of that function."""
    called: list[str] = []

    def run(place: str) -> None:
        called.append(place)

    module = ModuleType(f"{package}.evil")
    run.__module__, run.__qualname__ = module.__name__, "run"
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Made(run, ("here",)), called


def halve(path: Path) -> None:
    """Cuts a file off in the middle."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
