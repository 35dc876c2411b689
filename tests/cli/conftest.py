"""What tests of the generating commands share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.small_run import save_run


@pytest.fixture
def ask(place, here, monkeypatch) -> Callable[..., tuple[int, list[str], list[str]]]:
    """As `here`, in the folder `place`; gives lines of stdout and of stderr."""
    monkeypatch.chdir(place)

    def call(*arguments, **options):
        code, out, err = here(*arguments, **options)
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
