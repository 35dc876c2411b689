"""Data: indexed datasets, rows of other libraries, samples, batches, iterators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftk.lazy_names import lazy_names

if TYPE_CHECKING:
    from ftk.data.corpora.from_dataset import from_dataset
    from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter", "from_dataset"]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "ftk.data.corpora.from_dataset": "from_dataset",
        "ftk.data.indexed.dataset": "IndexedDataset IndexedDatasetWriter",
    },
)
