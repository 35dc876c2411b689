"""Generation: an engine that answers requests, searches over its logits, processors of scores.

What needs torch is imported when it is first used, so that commands can show their options without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.generation.config import GenerationConfig
from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.generation.engine.engine import Engine
    from ftk.generation.engine.request import Request
    from ftk.generation.search import Answer
    from ftk.generation.text import TextGenerator

__all__ = ["Answer", "Engine", "GenerationConfig", "Request", "TextGenerator"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.generation.engine.engine": "Engine",
        "ftk.generation.engine.request": "Request",
        "ftk.generation.search": "Answer",
        "ftk.generation.text": "TextGenerator",
    },
)
