"""The dataset `rows`: supervised data files, read with the tokenizer of the model that is fine-tuned."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ftk.config.options import option, required
from ftk.data.indexed.folder_layout import NoSplit, find_splits
from ftk.data.supervised.rows import Row, rows_of, split_of
from ftk.errors import UserError, download_hint
from ftk.registry import register_dataset
from ftk.tokenizers import find_description, load_tokenizer
from ftk.tokenizers.base import Tokenizer

_VALID = ("valid", "val", "dev", "validation")
"""Names of one split, of which data sets have one or another."""


@dataclass(kw_only=True)
class RowsConfig:
    data: str = required(
        "folder with train.jsonl, valid.jsonl (or val, dev, validation) ..., or train.source and train.target ...",
        positional=True,
        metavar="DATA",
        path=True,
    )
    tokenizer_folder: str | None = option(
        None,
        "a folder that ftk wrote the tokenizer to (a data folder, a checkpoint); by default that of the "
        "model that is trained on",
        metavar="DIR",
    )


@register_dataset("rows", config=RowsConfig)
class RowsCorpus:
    """Rows of JSON lines, or of lines of two files, by split.

    Args:
        tokenizer: of the model; that of `tokenizer_folder` goes first.

    Raises:
        UserError: the folder is missing or holds no rows; there is no tokenizer.
    """

    TAKES_TOKENIZER: ClassVar[bool] = True

    def __init__(self, config: RowsConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.folder = Path(config.data)
        if not self.folder.is_dir():
            problem = "a file, not a folder" if self.folder.exists() else "no such data folder"
            raise UserError(f"{config.data}: {problem}{download_hint(config.data, 'dataset')}")
        self.files = _find_files(self.folder)
        if config.tokenizer_folder is not None:
            tokenizer = load_tokenizer(config.tokenizer_folder)
        if tokenizer is None:
            raise UserError(
                "rows have no tokenizer; start from a model by `finetune_from` (for ftk-data show: `path`), or name a "
                "folder that holds one by `tokenizer_folder`"
            )
        self._tokenizer = tokenizer
        self._read: dict[str, list[Row]] = {}

    def splits(self) -> Sequence[str]:
        return sorted(self.files)

    def file(self, split: str) -> str:
        """The file of a split; `valid` may be called val, dev or validation.

        Raises:
            UserError: there is no such split.
        """
        name = split
        if split == _VALID[0] and split not in self.files:
            name = next((other for other in _VALID if other in self.files), split)
        if name not in self.files:
            raise NoSplit(f"{self.folder} has no split {split!r}; there are: {', '.join(self.splits())}")
        return self.files[name]

    def rows(self, split: str) -> list[Row]:
        """The rows of the file of a split.

        Raises:
            UserError: there is no such split, it has no row, or one cannot be read.
        """
        file = self.file(split)
        if file not in self._read:
            self._read[file] = rows_of(file)
        return self._read[file]

    def fingerprint(self, split: str) -> str:
        """What identifies the rows of a split in any folder: their number, and a checksum of their values."""
        checksum, rows = 0, self.rows(split)
        for row in rows:
            checksum = zlib.crc32(json.dumps(row.values, sort_keys=True).encode(), checksum)
        return f"{len(rows)} rows, checksum {checksum:08x}"

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def tokenizer_folder(self) -> Path:
        if self.config.tokenizer_folder is not None:
            return find_description(self.config.tokenizer_folder).parent
        return self._tokenizer.saved_for(self)


def _find_files(folder: Path) -> dict[str, str]:
    """Split -> its file."""
    if find_splits(folder):
        raise UserError(
            f"{folder} is a folder of tokens (.bin/.idx), and the task reads rows: give a folder with train.jsonl, or "
            "train.source and train.target; or a `task` that reads tokens"
        )
    files: dict[str, str] = {}
    for path in sorted(folder.iterdir()):
        split = split_of(path.name) if path.is_file() else None
        if split is None:
            continue
        if split in files:
            raise UserError(f"{folder}: {Path(files[split]).name} and {path.name} are both {split}; leave one")
        files[split] = str(path)
    if not files:
        raise UserError(f"{folder} holds no rows: neither SPLIT.jsonl nor SPLIT.source and SPLIT.target")
    return files
