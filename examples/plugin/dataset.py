"""A dataset: documents straight from text files, encoded when they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftk.config.options import required
from ftk.errors import UserError
from ftk.registry import register_dataset
from ftk.tokenizers import load_tokenizer
from ftk.tokenizers.base import Tokenizer


@dataclass(kw_only=True)
class TextLinesConfig:
    text: str = required("folder with train.txt, valid.txt", positional=True, metavar="DATA")
    tokenizer_folder: str = required("a folder with a saved tokenizer, e.g. ftk-preprocess's output")


class Lines:
    """Encoded lines of one file."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        self.arrays = arrays
        self.sizes = np.array([len(array) for array in arrays], dtype=np.int32)  # [num_documents]

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.arrays[index]


@register_dataset("text_lines", config=TextLinesConfig)
class TextLines:
    """`{split}.txt` files, one document per line."""

    def __init__(self, config: TextLinesConfig) -> None:
        self.folder = Path(config.text)
        self.config = config
        self._tokenizer = load_tokenizer(config.tokenizer_folder)

    def splits(self) -> Sequence[str]:
        return sorted(path.stem for path in self.folder.glob("*.txt"))

    def documents(self, split: str) -> Lines:
        if split not in self.splits():
            raise UserError(f"{self.folder} has no {split}.txt")
        lines = (self.folder / f"{split}.txt").read_text(encoding="utf-8").split("\n")
        encoded = self._tokenizer.encode_batch([line for line in lines if line.strip()])
        return Lines([np.array(ids, dtype=np.int64) for ids in encoded if ids])

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        folder = Path(self.config.tokenizer_folder)
        return folder / "tokenizer" if (folder / "tokenizer").is_dir() else folder
