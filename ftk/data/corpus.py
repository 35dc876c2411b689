"""Corpora: where the documents of a split and their tokenizer come from. `indexed` reads ftk-preprocess's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from ftk.data.indexed_dataset import IndexedDataset
from ftk.errors import UserError
from ftk.registry import register_dataset
from ftk.tokenizers import load_tokenizer
from ftk.tokenizers.base import Tokenizer


class Documents(Protocol):
    """Documents as arrays of token ids."""

    sizes: np.ndarray  # [num_documents] int32, tokens of each document

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> np.ndarray: ...  # [T] integer


class Corpus(Protocol):
    """What a registered dataset offers to a task."""

    def splits(self) -> Sequence[str]:
        """Names of the splits that are there."""

    def documents(self, split: str) -> Documents:
        """The documents of one split. Raises UserError if there is no such split."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the ids."""

    @property
    def tokenizer_folder(self) -> Path:
        """Folder with the tokenizer's own files, copied into every checkpoint."""


@dataclass(kw_only=True)
class IndexedCorpusConfig:
    data: str = field(metadata={"help": "folder written by ftk-preprocess", "positional": True, "metavar": "DATA"})


@register_dataset("indexed", config=IndexedCorpusConfig)
class IndexedCorpus:
    """A folder written by `ftk-preprocess`: `{train,valid,test}.{bin,idx}`, `tokenizer/`, `preprocess.json`.

    Raises:
        UserError: the folder is missing, is no such folder, or its tokenizer is not the one that made the ids.
    """

    def __init__(self, config: IndexedCorpusConfig) -> None:
        self.folder = Path(config.data)
        if not self.folder.exists():
            raise UserError(f"{self.folder}: no such data folder; make one with ftk-preprocess --destdir {self.folder}")
        if not self.folder.is_dir() or not self.splits():
            raise UserError(f"{self.folder} holds no .idx file; give a folder written by ftk-preprocess")

    def splits(self) -> Sequence[str]:
        return sorted(path.stem for path in self.folder.glob("*.idx")) if self.folder.is_dir() else []

    def documents(self, split: str) -> IndexedDataset:
        if split not in self.splits():
            raise UserError(f"{self.folder} has no split {split!r}; there are: {', '.join(self.splits())}")
        documents = IndexedDataset(self.folder / split)
        if len(documents) == 0:
            raise UserError(f"{self.folder / split}.idx holds no documents")
        return documents

    def tokenizer(self) -> Tokenizer:
        tokenizer = load_tokenizer(self.folder)
        made_with = self._recorded_fingerprint()
        if made_with is not None and made_with != tokenizer.fingerprint:
            raise UserError(
                f"{self.folder}/tokenizer is not the tokenizer that made this data (preprocess.json "
                f"says {made_with[:12]}, found {tokenizer.fingerprint[:12]}); run ftk-preprocess again"
            )
        return tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return self.folder / "tokenizer"

    def _recorded_fingerprint(self) -> str | None:
        record = self.folder / "preprocess.json"
        if not record.exists():  # files made by Megatron or fairseq have none
            return None
        try:
            return json.loads(record.read_text(encoding="utf-8"))["tokenizer"]["fingerprint"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{record} is damaged ({error}); run ftk-data verify {self.folder}") from error
