"""The dataset `raw`: text files, read and tokenised by each run. For small runs; nothing is written."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ftk.config.options import option, required
from ftk.data.corpora.documents import TokenizedDocuments
from ftk.data.indexed._index import flatten
from ftk.data.indexed.dataset import optimal_dtype
from ftk.data.indexed.folder_layout import NoSplit
from ftk.data.indexed.output_folder import RECORD
from ftk.data.text.blocks import Problem
from ftk.data.text.paths import FORMATS, TABLE_SUFFIXES, TEXT_SUFFIXES, compressed_suffix
from ftk.data.text.preprocess_config import TextConfig
from ftk.data.text.records import read_documents
from ftk.errors import UserError, counted
from ftk.registry import register_dataset
from ftk.tokenizers import find_description, load_tokenizer
from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_BATCH = 1000  # documents encoded at a time


@dataclass(kw_only=True)
class RawCorpusConfig(TextConfig):
    RETIRED: ClassVar[dict[str, Any]] = {"source_lang": "source", "target_lang": "target"}

    data: str = required(
        "folder with train.jsonl, valid.txt ..., or [SPLIT=]FILE[,[SPLIT=]FILE...]",
        positional=True,
        metavar="DATA",
        path=True,
    )
    tokenizer_folder: str = required(
        "a folder that ftk wrote a tokenizer to (a data folder, a checkpoint)", metavar="DIR"
    )
    text_format: str = option(
        "auto",
        "auto takes .jsonl, .ndjson and .json for JSONL, .parquet and .arrow for tables, others for text",
        choices=FORMATS,
    )
    raw_limit: int = option(100, "refuse a split of more text, which ftk-preprocess handles better", unit="MB", min=1)


@register_dataset("raw", config=RawCorpusConfig)
class RawCorpus:
    """Text and JSONL, tokenised when a split is first asked for.

    Raises:
        UserError: the files are missing; what cannot be read, unless it is skipped; the text is beyond `raw_limit`.
    """

    def __init__(self, config: RawCorpusConfig) -> None:
        self.config = config
        self.files = find_raw_files(config.data)
        self._tokenizer = load_tokenizer(config.tokenizer_folder)
        self._read: dict[str, TokenizedDocuments] = {}

    def splits(self) -> Sequence[str]:
        return sorted(self.files)

    def documents(self, split: str) -> TokenizedDocuments:
        if split not in self._read:
            started = time.monotonic()
            self._read[split] = self._encoded(split)
            logger.info(
                "%s: %s, %d tokens, tokenised in %.1f s; ftk-preprocess would do it once for all runs",
                split,
                counted(len(self._read[split]), "document"),
                self._read[split].tokens.size,
                time.monotonic() - started,
            )
        return self._read[split]

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return find_description(self.config.tokenizer_folder).parent

    def texts(self, split: str) -> Iterator[str]:
        """The documents of a split as text, one after the other."""
        skipped: Counter[str] = Counter()

        def skip(problem: Problem) -> None:
            skipped[problem.reason] += 1

        for document in read_documents(self._files(split), self.config, self.config.text_format, skip):
            yield document.text
        if skipped:
            counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
            logger.warning("%s: skipped %s", ", ".join(self._files(split)), counts)

    def _encoded(self, split: str) -> TokenizedDocuments:
        """Tokenised; documents of which nothing is left are left out."""
        dtype = optimal_dtype(self._tokenizer.vocab_size)
        tokens, sizes = [np.empty(0, dtype=dtype)], [np.empty(0, dtype=np.int32)]
        texts = self._within_limit(split)
        while batch := list(itertools.islice(texts, _BATCH)):
            flat, lengths = flatten([row for row in self._tokenizer.encode_batch(batch) if row], dtype)
            tokens.append(flat)
            sizes.append(lengths)
        documents = TokenizedDocuments(np.concatenate(tokens), np.concatenate(sizes))
        if not len(documents):
            raise UserError(f"{', '.join(self._files(split))}: no documents for {split}")
        return documents

    def _within_limit(self, split: str) -> Iterator[str]:
        read, limit = 0, self.config.raw_limit * 1_000_000
        for text in self.texts(split):
            read += len(text.encode("utf-8"))
            if read > limit:
                raise UserError(
                    f"{', '.join(self._files(split))}: more than {self.config.raw_limit} MB of text, which "
                    "`dataset` raw would tokenise in every run; run ftk-preprocess, or raise `raw_limit`"
                )
            yield text

    def _files(self, split: str) -> list[str]:
        if split not in self.files:
            raise NoSplit(f"{self.config.data} has no split {split!r}; there are: {', '.join(self.splits())}")
        return self.files[split]


def find_raw_files(data: str) -> dict[str, list[str]]:
    """Split -> its files, by their names in a folder, or of files that are named.

    Args:
        data: a folder with SPLIT.txt, SPLIT.jsonl (...), each perhaps compressed; or `[SPLIT=]FILE`, separated by
            commas, where a file without a split is of "train".

    Raises:
        UserError: a file is missing, or a folder holds two files for a split, or none at all.
    """
    folder = Path(data)
    splits: dict[str, list[str]] = {}
    if folder.is_dir():
        for path in sorted(path for path in folder.iterdir() if path.is_file() and path.name != RECORD):
            plain = Path(path.name.removesuffix(path.suffix) if compressed_suffix(path.name) else path.name)
            if plain.suffix.lower() in (*TEXT_SUFFIXES, *TABLE_SUFFIXES):
                splits.setdefault(plain.stem, []).append(str(path))
        for split, paths in splits.items():
            if len(paths) > 1:
                raise UserError(f"{folder}: {', '.join(Path(p).name for p in paths)} are all {split}; leave one")
        if not splits:
            raise UserError(f"{folder} holds no text: neither SPLIT.txt nor SPLIT.jsonl, e.g. train.txt")
        return splits
    for part in filter(None, (part.strip() for part in data.split(","))):
        split, separator, name = part.partition("=")
        if not separator or Path(part).exists():
            split, name = "train", part
        if not Path(name).is_file():
            raise UserError(f"{name}: {'a folder, not a file' if Path(name).is_dir() else 'no such file or folder'}")
        splits.setdefault(split, []).append(name)
    if not splits:
        raise UserError(f"{data!r} names no file")
    return splits
