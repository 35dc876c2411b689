"""What steers a search; one subject a file. Order and meaning: docs/generation.md, "Steering"."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftk.generation.processors.config import ProcessorConfig

if TYPE_CHECKING:
    from ftk.generation.processors.base import Processor, Processors, SearchState
    from ftk.generation.processors.build import build_processors

__all__ = ["Processor", "ProcessorConfig", "Processors", "SearchState", "build_processors"]

_HOMES = {"Processor": "base", "Processors": "base", "SearchState": "base", "build_processors": "build"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:  # what needs torch is imported when it is first used
        return getattr(importlib.import_module(f"ftk.generation.processors.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'ftk.generation.processors' has no attribute {name!r}")
