"""Fixtures of the tests of the service."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import ftk
from tests.serving.services import causal


@pytest.fixture
def calls_of(monkeypatch):
    """(object, name of a method) -> the threads, apart from the engine's, that call it from now on."""

    def watched(owner: Any, name: str) -> set[str]:
        method, threads = getattr(owner, name), set()

        def call(*arguments: Any, **named: Any) -> Any:
            threads.update({threading.current_thread().name} - {"engine"})
            return method(*arguments, **named)

        monkeypatch.setattr(owner, name, call)
        return threads

    return watched


@pytest.fixture(scope="module")
def run(place):
    return place / "run"


@pytest.fixture(scope="module")
def generator(run):
    return ftk.load_generator(run, max_len=8, batch_size=2)


@pytest.fixture(scope="module")
def continuer(run, tmp_path_factory):
    """A causal model with the tokenizer of the run."""
    return causal(tmp_path_factory.mktemp("continuer"), run / "checkpoint_1" / "tokenizer")
