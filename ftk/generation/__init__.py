"""Generation: searches over a decoder's logits, processors of scores, and the decoder with its caches.

What needs torch is imported when it is first used, so that commands can show their options without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.generation.config import GenerationConfig
from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.generation.search import Answer

__all__ = ["Answer", "GenerationConfig"]

__getattr__ = lazy_names(__name__, {"Answer": "ftk.generation.search"})
