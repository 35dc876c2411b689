"""What readers of other programs' files must refuse, or read without running it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftk.checkpoint.convert import convert_from
from ftk.errors import UserError


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


def edit_json(path: Path, **values: Any) -> None:
    """Other values in a mapping."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def assert_refused(form: Any, source: Path, message: str) -> None:
    """Asserts that a folder is refused in one line that names it and has one of the texts between the | of `message`,
    and that nothing is written beside it."""
    with pytest.raises(UserError) as caught:
        convert_from(form, source, source.with_name("ours"))
    assert any(text in str(caught.value) for text in message.split("|")), caught.value
    assert str(source) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in source.parent.iterdir()] == [source.name]
