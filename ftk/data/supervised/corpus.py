"""The dataset `rows`: supervised data files, read with the tokenizer of the model that is fine-tuned."""

from __future__ import annotations

import hashlib
import json
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from ftk.config.options import option, required
from ftk.data.indexed.folder_layout import NoSplit, find_splits
from ftk.data.supervised.row import Row
from ftk.data.supervised.rows import is_table, rows_of, split_of
from ftk.errors import UserError, counted, download_hint
from ftk.registry import register_dataset
from ftk.tokenizers import find_description, load_tokenizer
from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_TRAIN = "train"
_VALID = ("valid", "val", "dev", "validation")
"""Names of one split, of which data sets have one or another."""


@dataclass(kw_only=True)
class RowsConfig:
    data: str = required(
        "folder with train.jsonl, valid.jsonl (or val, dev, validation) ... (or .json, .csv, .tsv, .parquet, .arrow), "
        "or with train.source and train.target ...; or one file, the rows to train on",
        positional=True,
        metavar="DATA",
        path=True,
    )
    valid_ratio: float = option(
        0.0, "share of the training rows held out as the split valid, selected by a hash of their content", "[0, 1)"
    )
    tokenizer_folder: str | None = option(
        None,
        "a folder that ftk wrote the tokenizer to (a data folder, a checkpoint); by default that of the "
        "model that is trained on",
        metavar="DIR",
    )


@register_dataset("rows", config=RowsConfig)
class RowsCorpus:
    """Rows of files (`ftk.data.supervised.rows`) by split.

    Args:
        tokenizer: of the model; that of `tokenizer_folder` goes first.

    Raises:
        UserError: the folder is missing or holds no rows; there is no tokenizer.
    """

    TAKES_TOKENIZER: ClassVar[bool] = True

    def __init__(self, config: RowsConfig, tokenizer: Tokenizer | None = None) -> None:
        self.config = config
        self.folder = Path(config.data)
        if not self.folder.exists():
            raise UserError(f"{config.data}: no such data folder{download_hint(config.data, 'dataset')}")
        self.files = _find_files(self.folder) if self.folder.is_dir() else {_TRAIN: config.data}
        if config.valid_ratio > 0.0 and (_TRAIN not in self.files or not self.files.keys().isdisjoint(_VALID)):
            raise UserError(
                f"`valid_ratio` needs a split {_TRAIN} and no split {_VALID[0]}; {self.folder} has "
                f"{', '.join(self.files)}"
            )
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
        return sorted([*self.files, *([_VALID[0]] if self.config.valid_ratio > 0.0 else [])])

    def file(self, split: str) -> str | None:
        """The file of a split; `valid` may be called val, dev or validation. None: its rows are part of another file.

        Raises:
            UserError: there is no such split.
        """
        if self.config.valid_ratio > 0.0 and split in (_TRAIN, _VALID[0]):
            return None
        name = split
        if split == _VALID[0] and split not in self.files:
            name = next((other for other in _VALID if other in self.files), split)
        if name not in self.files:
            can_divide = split == _VALID[0] and _TRAIN in self.files
            hint = f"; `valid_ratio` holds out some rows of {_TRAIN}" if can_divide else ""
            raise NoSplit(f"{self.folder} has no split {split!r}; there are: {', '.join(self.splits())}{hint}")
        return self.files[name]

    def rows(self, split: str) -> list[Row]:
        """The rows of the file of a split.

        Raises:
            UserError: there is no such split, it has no row, or one cannot be read.
        """
        file = self.file(split)
        if file is not None:
            return self._rows(file)
        rows = self._rows(self.files[_TRAIN])
        count = round(len(rows) * self.config.valid_ratio)
        # By what a row holds: equal rows stay together, and nearly all stay where they are as a file grows.
        hashes = [hashlib.blake2b(_written(row), digest_size=8).digest() for row in rows]
        last = sorted(hashes)[count - 1] if count else b""
        found = [row for row, one in zip(rows, hashes, strict=True) if (one <= last) == (split != _TRAIN)]
        if not 0 < len(found) < len(rows):
            raise UserError(
                f"{self.files[_TRAIN]}: `valid_ratio` {self.config.valid_ratio} would hold out {count} of "
                f"{counted(len(rows), 'row')}; choose one that leaves rows in both splits"
            )
        return found

    def _rows(self, file: str) -> list[Row]:
        if file not in self._read:
            self._read[file] = rows_of(file)
        return self._read[file]

    def fingerprint(self, split: str) -> str:
        """What identifies the rows of a split in any folder: their number, and a checksum of their values."""
        checksum, rows = 0, self.rows(split)
        for row in rows:
            checksum = zlib.crc32(_written(row), checksum)
        return f"{len(rows)} rows, checksum {checksum:08x}"

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def tokenizer_folder(self) -> Path:
        if self.config.tokenizer_folder is not None:
            return find_description(self.config.tokenizer_folder).parent
        return self._tokenizer.saved_for(self)


def _written(row: Row) -> bytes:
    return json.dumps(row.values, sort_keys=True, default=str).encode()


def _find_files(folder: Path) -> dict[str, str]:
    """Split -> its file."""
    if find_splits(folder):
        raise UserError(
            f"{folder} is a folder of tokens (.bin/.idx), and the task reads rows: give a folder with train.jsonl, or "
            "train.source and train.target; or a `task` that reads tokens"
        )
    files: dict[str, str] = {}
    for path in sorted(folder.iterdir(), key=lambda path: (is_table(path.name), path.name)):
        split = split_of(path.name) if path.is_file() else None
        if split is None:
            continue
        if split in files and is_table(path.name) and not is_table(files[split]):
            logger.info("%s: reading %s, not %s", folder, Path(files[split]).name, path.name)
            continue
        if split in files:
            raise UserError(
                f"{folder}: {Path(files[split]).name} and {path.name} are both {split}; keep one, or merge them"
            )
        files[split] = str(path)
    if not files:
        raise UserError(
            f"{folder} holds no rows: neither SPLIT.jsonl, .csv or .parquet nor SPLIT.source and SPLIT.target"
        )
    return files
