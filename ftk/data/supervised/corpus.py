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
from typing import Any, ClassVar

from ftk.config.options import option, required
from ftk.data.corpora.composition import Blend, BlendConfig, parse_data
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
class RowsConfig(BlendConfig):
    data: str = required(
        "folder with train.jsonl, valid.jsonl ... (or .csv, .parquet ...) or train.source and train.target ..., one "
        "file of rows to train on, or several of these to blend: A,B; valid may be called val, dev or validation; "
        "files may also be .json, .tsv or .arrow",
        positional=True,
        metavar="DATA",
        path=True,
    )
    valid_ratio: float = option(
        0.0,
        "share of the training rows held out as the split valid, selected by a hash of their content; of several data "
        "sets that share of each without a split valid",
        "[0, 1)",
    )
    tokenizer_folder: str | None = option(
        None,
        "a folder that ftk wrote the tokenizer to (a data folder, a checkpoint); by default that of the "
        "model that is trained on",
        metavar="DIR",
    )


@register_dataset("rows", config=RowsConfig)
class RowsCorpus(Blend):
    """Rows of files (`ftk.data.supervised.rows`) by split; of several data sets one after the other, or blended.

    Every data set needs the split train; any other split is that of the sets that have it. `valid_ratio` is for each
    set that has no split valid; what one holds out is trained on in none.

    Args:
        tokenizer: of the model; that of `tokenizer_folder` goes first.

    Raises:
        UserError: a folder is missing or holds no rows; there are not as many weights as data sets; there is no
            tokenizer.
    """

    TAKES_TOKENIZER: ClassVar[bool] = True

    def __init__(self, config: RowsConfig, tokenizer: Tokenizer | None = None) -> None:
        super().__init__(parse_data(config.data, has_shards=False), config)
        self.config = config
        self.sets = [RowSet(path, config.valid_ratio) for (path,) in self.names]
        if config.valid_ratio > 0.0 and not any(data_set.valid_ratio for data_set in self.sets):
            there = f"{self.sets[0].folder} has {', '.join(self.sets[0].files)}"
            raise UserError(f"`valid_ratio` needs a split {_TRAIN} and no split {_VALID[0]}; {there}")
        if config.tokenizer_folder is not None:
            tokenizer = load_tokenizer(config.tokenizer_folder)
        if tokenizer is None:
            raise UserError(
                "rows have no tokenizer; start from a model by `finetune_from` (for ftk-data show: `path`), or name a "
                "folder that holds one by `tokenizer_folder`"
            )
        self._tokenizer = tokenizer
        self._training_rows: dict[int, list[Row]] = {}  # of each data set

    def splits(self) -> Sequence[str]:
        return sorted({split for data_set in self.sets for split in data_set.splits()})

    def file(self, split: str) -> str | None:
        """The file of a split; `valid` may be called val, dev or validation. None: its rows are part of another file,
        or of several.

        Raises:
            UserError: there is no such split.
        """
        files = [data_set.file(split) for data_set in self._sets_with(split).values()]
        return files[0] if len(files) == 1 else None

    def rows(self, split: str) -> list[Row]:
        """The rows of a split.

        Raises:
            UserError: there is no such split, a file has no row, or one cannot be read.
        """
        found = [self._rows(number, split) for number in self._sets_with(split)]
        return found[0] if len(found) == 1 else [row for rows in found for row in rows]

    def fingerprint(self, split: str) -> str:
        """What identifies the rows of a split in any folder: of each data set their number, and a checksum."""
        return " + ".join(_fingerprint(self._rows(number, split)) for number in self._sets_with(split))

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def tokenizer_folder(self) -> Path:
        if self.config.tokenizer_folder is not None:
            return find_description(self.config.tokenizer_folder).parent
        return self._tokenizer.saved_for(self)

    def _parts(self, split: str) -> dict[int, list[Any]]:
        found = self._sets_with(split)
        for number, data_set in enumerate(self.sets):
            if number not in found:
                logger.info("%s: %s does not have this split and is left out of it", split, data_set.folder)
        return {number: [self._rows(number, split)] for number in found}

    def _rows(self, number: int, split: str) -> list[Row]:
        """The rows of a split of one data set; to train on without those that another holds out."""
        rows = self.sets[number].rows(split)
        if split != _TRAIN or len(self.sets) == 1 or not self._held_out:
            return rows
        if number not in self._training_rows:
            kept = self._training_rows[number] = [row for row in rows if _digest(row) not in self._held_out]
            if len(kept) < len(rows):
                what = "%s: %d of %d rows are not trained on, since other data sets hold them out by `valid_ratio`"
                logger.info(what, self.names[number][0], len(rows) - len(kept), len(rows))
        if not self._training_rows[number]:
            name = self.names[number][0]
            raise UserError(f"{name}: other data sets hold out all its rows by `valid_ratio`; leave {name} out")
        return self._training_rows[number]

    @cached_property
    def _held_out(self) -> set[bytes]:
        return {digest for data_set in self.sets for digest in data_set.held_out}

    def _sets_with(self, split: str) -> dict[int, RowSet]:
        """The data sets that have a split, by their numbers. NoSplit: none has it, or one lacks `train`."""
        found, lacking = {}, []
        for number, data_set in enumerate(self.sets):
            try:
                data_set.file(split)
                found[number] = data_set
            except NoSplit as error:
                lacking.append(error)
        if lacking and (split == _TRAIN or not found):
            raise lacking[0]
        return found


class RowSet:
    """One folder or file of rows.

    Args:
        valid_ratio: share of the rows of `train` that are the split valid, if there is no such file.

    Attributes:
        files: split -> its file.

    Raises:
        UserError: it is missing, or holds no rows.
    """

    def __init__(self, path: str, valid_ratio: float) -> None:
        self.folder = Path(path)
        if not self.folder.exists():
            raise UserError(f"{path}: no such file or folder{download_hint(path, 'dataset')}")
        self.files = _find_files(self.folder) if self.folder.is_dir() else {_TRAIN: path}
        can_divide = _TRAIN in self.files and self.files.keys().isdisjoint(_VALID)
        self.valid_ratio = valid_ratio if can_divide else 0.0
        self._read: dict[str, list[Row]] = {}

    def splits(self) -> Sequence[str]:
        return sorted([*self.files, *([_VALID[0]] if self.valid_ratio > 0.0 else [])])

    def file(self, split: str) -> str | None:
        """As `RowsCorpus.file`."""
        if self.valid_ratio > 0.0 and split in (_TRAIN, _VALID[0]):
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
        """As `RowsCorpus.rows`."""
        file = self.file(split)
        if file is not None:
            return self._rows(file)
        pairs = zip(self._rows(self.files[_TRAIN]), self._digests, strict=True)
        return [row for row, digest in pairs if (digest in self.held_out) == (split != _TRAIN)]

    @cached_property
    def held_out(self) -> set[bytes]:
        """Digests of the rows that `valid_ratio` holds out.

        Raises:
            UserError: these are none, or all.
        """
        if self.valid_ratio == 0.0:
            return set()
        # By what a row holds: equal rows stay together, and nearly all stay where they are as a file grows.
        digests = sorted(self._digests)
        count = round(len(digests) * self.valid_ratio)
        if not count or digests[count - 1] == digests[-1]:
            raise UserError(
                f"{self.files[_TRAIN]}: `valid_ratio` {self.valid_ratio} would hold out {count} of "
                f"{counted(len(digests), 'row')}; choose one that leaves rows in both splits"
            )
        return {*digests[:count]}

    @cached_property
    def _digests(self) -> list[bytes]:
        return [_digest(row) for row in self._rows(self.files[_TRAIN])]

    def _rows(self, file: str) -> list[Row]:
        if file not in self._read:
            self._read[file] = rows_of(file)
        return self._read[file]


def _fingerprint(rows: Sequence[Row]) -> str:
    """The number of rows, and a checksum of their values."""
    checksum = 0
    for row in rows:
        checksum = zlib.crc32(_written(row), checksum)
    return f"{len(rows)} rows, checksum {checksum:08x}"


def _digest(row: Row) -> bytes:
    return hashlib.blake2b(_written(row), digest_size=8).digest()


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
