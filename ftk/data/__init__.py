"""Data: indexed datasets, samples, batches, iterators."""

from __future__ import annotations

from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter"]
