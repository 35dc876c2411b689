"""What tests of the generating commands share."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from tests.small_run import save_run


@pytest.fixture
def ask(place, capsys, monkeypatch) -> Callable[..., tuple[int, list[str], list[str]]]:
    """ask(main, *arguments, stdin=bytes) -> (exit code, lines of stdout, lines of stderr); relative to the folder."""
    monkeypatch.chdir(place)

    def call(main, *arguments, stdin=b""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        capsys.readouterr()
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out.splitlines(), err.splitlines()

    return call


@pytest.fixture
def second(place):
    """Another checkpoint with the same tokenizer, and one with another."""
    for name, data in (("second", "data-bin"), ("foreign", "other-bin")):
        if (place / name).exists():
            continue
        save_run(place / name, place / data, seed=7)
    return "second"
