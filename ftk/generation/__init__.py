"""Filling blanks: `SequenceGenerator` from ids to ids, `BlankFiller` from text to text.

What needs torch is imported when it is first used, so that commands can show their options without it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ftk.generation.config import GenerationConfig

if TYPE_CHECKING:
    from ftk.generation.fill import BlankFiller
    from ftk.generation.results import FilledBlank, FillResult
    from ftk.generation.search import Answer
    from ftk.generation.sequence_generator import SequenceGenerator
    from ftk.generation.streaming import Piece

__all__ = ["Answer", "BlankFiller", "FillResult", "FilledBlank", "GenerationConfig", "Piece", "SequenceGenerator"]

_HOMES = {
    "Answer": "ftk.generation.search",
    "BlankFiller": "ftk.generation.fill",
    "FillResult": "ftk.generation.results",
    "FilledBlank": "ftk.generation.results",
    "Piece": "ftk.generation.streaming",
    "SequenceGenerator": "ftk.generation.sequence_generator",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'ftk.generation' has no attribute {name!r}")
