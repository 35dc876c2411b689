"""Fixtures of the tests of the service."""

from __future__ import annotations

import threading
from typing import Any

import pytest


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
