"""ftk: a registry-based sequence-modeling toolkit.

Importing this package imports nothing heavy. What stands in `__all__` is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.lazy_names import lazy_names
from ftk.version import __version__

if TYPE_CHECKING:
    from ftk.hub import load_generator, load_model, load_tokenizer
    from ftk.model_parallel.parallelize import parallelize

__all__ = ["__version__", "load_generator", "load_model", "load_tokenizer", "parallelize"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.hub": "load_generator load_model load_tokenizer",
        "ftk.model_parallel.parallelize": "parallelize",
    },
)
