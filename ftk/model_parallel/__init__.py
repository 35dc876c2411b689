"""How one model runs on many devices: the only room that knows process groups.

Importing this package imports nothing heavy. What stands in `__all__` is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.model_parallel.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
    from ftk.model_parallel.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        VocabParallelEmbedding,
    )

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding", "vocab_parallel_cross_entropy"]

__getattr__ = lazy_names(
    __name__,
    {
        "ColumnParallelLinear": "ftk.model_parallel.tensor_parallel.layers",
        "RowParallelLinear": "ftk.model_parallel.tensor_parallel.layers",
        "VocabParallelEmbedding": "ftk.model_parallel.tensor_parallel.layers",
        "vocab_parallel_cross_entropy": "ftk.model_parallel.tensor_parallel.cross_entropy",
    },
)
