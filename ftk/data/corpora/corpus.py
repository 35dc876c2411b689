"""Corpora: where the documents of a split and their tokenizer come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ftk.data.corpora.documents import Documents
from ftk.tokenizers.base import Tokenizer


class Corpus(Protocol):
    """What a registered dataset offers to a task.

    It may also have `samples(split, make_samples, seed)`, which gives the samples of a split (`SampleDataset`):
    `make_samples(documents, seed)` makes those of the task, which it may blend, filter or leave out for its own. With
    it, `documents` may be missing.
    """

    def splits(self) -> Sequence[str]:
        """Names of the splits that are there."""

    def documents(self, split: str) -> Documents:
        """The documents of one split. Raises UserError if it is not there."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with the tokenizer's own files."""
