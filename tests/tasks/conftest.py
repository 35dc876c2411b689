"""Checkpoints that the tasks' tests start from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.tasks.cloze.made import make_model


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Callable[[str], Path]:
    """A function that gives a checkpoint of a family, made once."""
    folder, made = tmp_path_factory.mktemp("bases"), {}

    def base(name: str) -> Path:
        if name not in made:
            made[name] = make_model(folder / name, name)
        return made[name]

    return base
