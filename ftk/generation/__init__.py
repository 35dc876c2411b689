"""Filling blanks: `SequenceGenerator` from ids to ids, `BlankFiller` from text to text.

What needs torch is imported when it is first used, so that commands can show their options without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.generation.config import GenerationConfig
from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.generation.fill import BlankFiller
    from ftk.generation.results import FilledBlank, FillResult
    from ftk.generation.search import Answer
    from ftk.generation.sequence_generator import SequenceGenerator
    from ftk.generation.streaming import Piece

__all__ = ["Answer", "BlankFiller", "FillResult", "FilledBlank", "GenerationConfig", "Piece", "SequenceGenerator"]

__getattr__ = lazy_names(
    __name__,
    {
        "Answer": "ftk.generation.search",
        "BlankFiller": "ftk.generation.fill",
        "FillResult": "ftk.generation.results",
        "FilledBlank": "ftk.generation.results",
        "Piece": "ftk.generation.streaming",
        "SequenceGenerator": "ftk.generation.sequence_generator",
    },
)
