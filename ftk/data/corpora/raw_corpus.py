"""The dataset `raw`: text files, read and tokenised when they are opened. For small runs; nothing is written."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data.corpora.raw_files import RawFiles, find_raw_files
from ftk.data.indexed._index import flatten
from ftk.data.indexed.dataset import optimal_dtype
from ftk.data.indexed.folder_layout import NoSplit
from ftk.data.text.files import FORMATS, MAX_DOCUMENT_BYTES, SEPARATORS, TOO_LARGE, Problem, kind_of, read_blocks
from ftk.data.text.records import is_empty, parse_block, read_documents
from ftk.errors import UserError, counted
from ftk.registry import register_dataset
from ftk.tokenizers import find_description, load_tokenizer
from ftk.tokenizers.base import Tokenizer

logger = logging.getLogger(__name__)

_BATCH = 1000  # documents encoded at a time


@dataclass(kw_only=True)
class RawCorpusConfig:
    data: str = field(
        metadata={
            "help": "folder with train.jsonl, valid.txt, train.source and train.target ..., or "
            "[SPLIT=]FILE[,[SPLIT=]FILE...]",
            "positional": True,
            "metavar": "DATA",
            "path": True,
        }
    )
    tokenizer_folder: str = field(
        metadata={"help": "a folder that ftk wrote a tokenizer to (a data folder, a checkpoint)", "metavar": "DIR"}
    )
    text_format: str = field(
        default="auto",
        metadata={"help": "auto takes .jsonl, .ndjson and .json for JSONL, others for text", "choices": FORMATS},
    )
    document_separator: str = field(
        default="line",
        metadata={
            "help": "in text, a document is a line, ends at a blank line, or is a file",
            "choices": SEPARATORS,
        },
    )
    text_key: str = field(default="text", metadata={"help": "field of each JSON object that holds the text"})
    source_lang: str = field(
        default="source", metadata={"help": "ending of the files that hold sources, as in train.source"}
    )
    target_lang: str = field(
        default="target", metadata={"help": "ending of the files that hold targets, as in train.target"}
    )
    max_document_bytes: int = field(
        default=MAX_DOCUMENT_BYTES,
        metadata={"help": "a longer document counts as one that cannot be read", "unit": "bytes"},
    )
    on_error: str = field(
        default="raise",
        metadata={
            "help": "stop at the first document that cannot be read, or skip such documents and count them",
            "choices": ("raise", "skip"),
        },
    )
    raw_limit: int = field(
        default=100,
        metadata={"help": "refuse a split of more text, which ftk-preprocess handles better", "unit": "MB"},
    )

    def validate(self) -> Iterator[str]:
        if self.raw_limit < 1:
            yield f"raw_limit is {self.raw_limit}; it must be at least 1"
        if self.max_document_bytes < 1:
            yield f"max_document_bytes is {self.max_document_bytes}; it must be at least 1"
        for name in ("text_key", "source_lang", "target_lang"):
            if not getattr(self, name):
                yield f"{name} is empty; it must be a name"
        if self.source_lang == self.target_lang:
            yield f"source_lang and target_lang are both {self.source_lang!r}; they must differ"


class TokenizedDocuments:
    """Documents in memory, back to back in one array.

    Args:
        tokens: all of them, [sum of sizes].
        sizes: tokens in each, [documents].
    """

    def __init__(self, tokens: npt.NDArray[Any], sizes: npt.NDArray[np.int32]) -> None:
        self.tokens = tokens
        self.sizes = sizes
        self.offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


@register_dataset("raw", config=RawCorpusConfig)
class RawCorpus:
    """Text, JSONL and parallel `.source/.target` files, tokenised when a split is first asked for.

    Raises:
        UserError: the files are missing; one side of a pair is; what cannot be read, unless it is skipped; sources
            and targets differ in number; a source or a target is empty; the text is beyond `raw_limit`.
    """

    def __init__(self, config: RawCorpusConfig) -> None:
        self.config = config
        self.files = find_raw_files(config.data, config.source_lang, config.target_lang)
        self._tokenizer = load_tokenizer(config.tokenizer_folder)
        self._read: dict[str, tuple[TokenizedDocuments, TokenizedDocuments | None]] = {}

    def splits(self) -> Sequence[str]:
        return sorted(self.files)

    def documents(self, split: str) -> TokenizedDocuments:
        return self._split(split)[0]

    def has_targets(self, split: str) -> bool:
        return bool(self._files(split).targets)

    def targets(self, split: str) -> TokenizedDocuments:
        targets = self._split(split)[1]
        if targets is None:
            raise UserError(
                f"{self.config.data}: {split} has no targets; pairs {split}.source, {split}.target are meant"
            )
        return targets

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def target_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def tokenizer_folder(self) -> Path:
        return find_description(self.config.tokenizer_folder).parent

    def texts(self, split: str) -> Iterator[str]:
        """The documents of a split as text, one after the other."""
        yield from read_texts(self._files(split).sources, self.config)

    def pairs(self, split: str) -> Iterator[tuple[str, str]]:
        """The sources and targets of a split as text."""
        files = self._files(split)
        for source, target in zip(files.sources, files.targets, strict=True):
            yield from read_pairs(source, target, self.config)

    def _split(self, split: str) -> tuple[TokenizedDocuments, TokenizedDocuments | None]:
        if split not in self._read:
            started = time.monotonic()
            read = self._read_pairs(split) if self.has_targets(split) else (self._read_texts(split), None)
            self._read[split] = read
            logger.info(
                "%s: %s, %d tokens, tokenised in %.1f s; ftk-preprocess would do it once for all runs",
                split,
                counted(len(read[0]), "document"),
                read[0].tokens.size,
                time.monotonic() - started,
            )
        return self._read[split]

    def _read_texts(self, split: str) -> TokenizedDocuments:
        texts = self._within_limit(split, ((text,) for text in self.texts(split)))
        return self._encode(split, (text for (text,) in texts))

    def _read_pairs(self, split: str) -> tuple[TokenizedDocuments, TokenizedDocuments]:
        sources, targets = [], []
        for source, target in self._within_limit(split, self.pairs(split)):
            sources.append(source)
            targets.append(target)
        return self._encode(split, sources, keep=True), self._encode(split, targets, keep=True)

    def _encode(self, split: str, texts: Iterable[str], keep: bool = False) -> TokenizedDocuments:
        """Tokenised; documents of which nothing is left go, unless their places matter."""
        dtype = optimal_dtype(self._tokenizer.vocab_size)
        tokens, sizes = [np.empty(0, dtype=dtype)], [np.empty(0, dtype=np.int32)]
        for batch in _batches(texts, _BATCH):
            rows = self._tokenizer.encode_batch(batch)
            flat, lengths = flatten(rows if keep else [row for row in rows if row], dtype)
            tokens.append(flat)
            sizes.append(lengths)
        documents = TokenizedDocuments(np.concatenate(tokens), np.concatenate(sizes))
        if not len(documents):
            raise UserError(f"{', '.join(self._files(split).sources)}: no documents for {split}")
        return documents

    def _within_limit(self, split: str, items: Iterable[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
        read, limit = 0, self.config.raw_limit * 1_000_000
        for item in items:
            read += sum(len(text.encode("utf-8")) for text in item)
            if read > limit:
                raise UserError(
                    f"{', '.join(self._files(split).sources)}: more than {self.config.raw_limit} MB of text, which "
                    "--dataset raw would tokenise in every run; run ftk-preprocess, or raise --raw-limit"
                )
            yield item

    def _files(self, split: str) -> RawFiles:
        if split not in self.files:
            raise NoSplit(f"{self.config.data} has no split {split!r}; there are: {', '.join(self.splits())}")
        return self.files[split]


def read_texts(paths: Sequence[str], config: RawCorpusConfig) -> Iterator[str]:
    skipped: Counter[str] = Counter()

    def skip(problem: Problem) -> None:
        skipped[problem.reason] += 1

    documents = read_documents(
        paths,
        format=config.text_format,
        separator=config.document_separator,
        text_key=config.text_key,
        max_document_bytes=config.max_document_bytes,
        on_problem=skip if config.on_error == "skip" else None,
    )
    for document in documents:
        yield document.text
    _warn(", ".join(paths), skipped)


def read_pairs(source: str, target: str, config: RawCorpusConfig) -> Iterator[tuple[str, str]]:
    """Line i of one file with line i of the other."""
    skipped: Counter[str] = Counter()
    for number, sides in enumerate(itertools.zip_longest(_lines(source, config), _lines(target, config)), start=1):
        if None in sides:
            counts = (sum(1 for _ in _lines(path, config)) for path in (source, target))
            raise UserError(
                "{0} has {2} lines, {1} has {3}; line i of one belongs to line i of the other, "
                "so they must have the same number".format(source, target, *counts)
            )
        problem = next((side for side in sides if isinstance(side, Problem)), None)
        if problem is None:
            for path, text in zip((source, target), sides, strict=True):
                if is_empty(str(text)) and problem is None:
                    message = (
                        f"{path}:{number}: an empty line has no partner's meaning; take line {number} out of both "
                        f"{source} and {target}, or skip such pairs with --on-error skip"
                    )
                    problem = Problem("empty", path, number, 0, message)
                    if config.on_error == "raise":
                        raise UserError(message)
        elif config.on_error == "raise":
            raise UserError(str(problem))
        if problem is not None:
            skipped[problem.reason] += 1
        else:
            yield str(sides[0]), str(sides[1])
    _warn(f"{source}, {target}", skipped)


def _lines(path: str, config: RawCorpusConfig) -> Iterator[str | Problem]:
    """The lines of one side, empty ones included."""
    limit = config.max_document_bytes
    for block in read_blocks(path, kind_of(path, "text", "line"), max_document_bytes=limit):
        for record in parse_block(block, config.text_key, limit):
            if record is block.problem and record.reason != TOO_LARGE:
                raise UserError(str(record))  # the whole file: there is nothing to skip to
            yield record if isinstance(record, Problem) else record.text


def _warn(paths: str, skipped: Counter[str]) -> None:
    if skipped:
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(skipped.items()))
        logger.warning("%s: skipped %s", paths, counts)


def _batches(texts: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, size)):
        yield batch
