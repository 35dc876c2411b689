"""Data: indexed datasets, samples, batches, iterators."""

from __future__ import annotations

from ftk.data.indexed_dataset import IndexedDataset, IndexedDatasetWriter

__all__ = ["IndexedDataset", "IndexedDatasetWriter"]
