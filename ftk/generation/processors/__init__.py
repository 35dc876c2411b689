"""What steers a search; one subject a file. Order and meaning: docs/generation.md, "Steering"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.generation.processors.config import ProcessorConfig
from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.generation.processors.base import Processor, Processors, SearchState
    from ftk.generation.processors.build import build_processors

__all__ = ["Processor", "ProcessorConfig", "Processors", "SearchState", "build_processors"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.generation.processors.base": "Processor Processors SearchState",
        "ftk.generation.processors.build": "build_processors",
    },
)
