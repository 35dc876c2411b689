"""A `datasets.Dataset`, or any other rows in Python, as a corpus: in memory, or as a data folder."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ftk.data.corpora.corpus import Corpus
from ftk.data.corpora.documents import TokenizedDocuments
from ftk.data.corpora.indexed_corpus import IndexedCorpus, IndexedCorpusConfig
from ftk.data.indexed.dataset import optimal_dtype
from ftk.data.indexed.folder_layout import NoSplit
from ftk.data.indexed.output_folder import whole_folder
from ftk.data.text.blocks import Block
from ftk.data.text.encoding import EncodedBlock, EncodingSettings, encode_blocks
from ftk.data.text.paths import ROWS
from ftk.data.text.preprocess_config import Shard, TextConfig, as_shard, is_shard
from ftk.data.text.preprocess_report import SplitReport, write_record_of
from ftk.data.text.split_writer import SplitWriter
from ftk.errors import UserError
from ftk.terminal import bar_width
from ftk.tokenizers import load_tokenizer
from ftk.tokenizers.base import Tokenizer

_BATCH = 1000  # rows encoded at a time


def from_dataset(
    dataset: Any,
    tokenizer: Tokenizer | str | Path,
    *,
    column: str = "text",
    destdir: str | Path | None = None,
    overwrite: bool = False,
    on_error: str = "raise",
    shard: str | None = None,
) -> Corpus:
    """What ftk's tasks read, made of rows: each is a document.

        corpus = ftk.data.from_dataset(dataset, "data-bin", column="body")
        task = CausalLMTask(CausalLMConfig(seq_length=128), corpus=corpus, seed=1)

    Args:
        dataset: a `datasets.Dataset`, or anything that gives rows as mappings (a list of dictionaries): the split
            "train"; or a mapping from names of splits to such rows (`datasets.DatasetDict`).
        tokenizer: or a folder that ftk wrote one to (a data folder, a checkpoint).
        column: key of the text in a row.
        destdir: data folder to write, as ftk-preprocess does; None: the documents stay in memory.
        on_error: "raise" at the first row that cannot be read, or "skip" such rows.
        shard: "I/N": these rows are part I of N, and `ftk-data merge` joins the N folders; a part may be empty.

    Returns:
        a corpus in memory, or the one of the folder `destdir`.

    Raises:
        UserError: an unknown `on_error`, no split, no such column, a row without text, no document left, or a folder
            that cannot be written.
    """
    if isinstance(dataset, (str, Path)):
        raise UserError(f"{dataset}: a name, not rows; give what datasets.load_dataset({str(dataset)!r}) returns")
    if not isinstance(tokenizer, Tokenizer):
        tokenizer = load_tokenizer(tokenizer)
    if on_error not in ("raise", "skip"):
        raise UserError(f"on_error is {on_error!r:.40}; it must be 'raise' or 'skip'")
    options = TextConfig(text_key=column, on_error=on_error)
    if shard is not None and (destdir is None or not is_shard(shard)):
        raise UserError(f"shard is {shard!r:.40}; it must be I/N, e.g. 2/8, and goes with `destdir`")
    splits: dict[str, Any] = dict(dataset) if isinstance(dataset, Mapping) else {"train": dataset}
    if not splits:
        raise UserError("dataset is an empty mapping; give rows by the name of their split, as {'train': rows}")
    if destdir is None:
        return TokenizedCorpus(
            {name: _documents(name, rows, tokenizer, options) for name, rows in splits.items()}, tokenizer
        )
    with whole_folder(Path(destdir), overwrite) as folder:
        _write_splits(folder, splits, tokenizer, options, None if shard is None else as_shard(shard))
    return IndexedCorpus(IndexedCorpusConfig(data=str(destdir)))


def _write_splits(
    folder: Path, splits: Mapping[str, Any], tokenizer: Tokenizer, options: TextConfig, shard: Shard | None
) -> None:
    tokenizer.save(folder / "tokenizer")
    reports: dict[str, SplitReport] = {}
    checksums: dict[str, str] = {}
    for name, rows in splits.items():
        reports[name] = report = SplitReport({})
        with SplitWriter(folder, name, {}, optimal_dtype(tokenizer.vocab_size)) as writer:
            for block in _encoded(name, rows, tokenizer, options, may_be_empty=shard is not None):
                writer.add(block)
                report.add(block, block.problems)
        report.documents, report.tokens = writer.documents[name], writer.tokens[name]
        checksums |= writer.checksums()
    settings = {"text_key": options.text_key, "on_error": options.on_error}
    write_record_of(folder, settings, tokenizer, reports, checksums, shard)


class TokenizedCorpus:
    """Documents in memory.

    Args:
        documents: by split.
        tokenizer: the one that made their ids.
    """

    def __init__(self, documents: dict[str, TokenizedDocuments], tokenizer: Tokenizer) -> None:
        self._documents = documents
        self._tokenizer = tokenizer

    def splits(self) -> Sequence[str]:
        return sorted(self._documents)

    def documents(self, split: str) -> TokenizedDocuments:
        if split not in self._documents:
            raise NoSplit(f"the dataset has no split {split!r}; there are: {', '.join(self.splits())}")
        return self._documents[split]

    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @cached_property
    def tokenizer_folder(self) -> Path:
        return self._tokenizer.saved_for(self)


def _documents(split: str, rows: Any, tokenizer: Tokenizer, options: TextConfig) -> TokenizedDocuments:
    blocks = list(_encoded(split, rows, tokenizer, options))
    return TokenizedDocuments(
        np.concatenate([block.tokens for block in blocks]), np.concatenate([block.lengths for block in blocks])
    )


def _encoded(
    split: str, rows: Any, tokenizer: Tokenizer, options: TextConfig, *, may_be_empty: bool = False
) -> Iterator[EncodedBlock]:
    """The documents of a split. UserError: there is none, or one cannot be read and is not to be skipped."""
    from tqdm import tqdm

    settings = EncodingSettings(Path(), optimal_dtype(tokenizer.vocab_size), options)
    first, found = 1, False
    total = len(rows) if isinstance(rows, Sized) else None
    with tqdm(total=total, desc=split, unit="row", disable=None, **bar_width(sys.stderr)) as bar:  # on a terminal
        for texts in _batches(split, rows, options.text_key):
            block = encode_blocks([_block(split, texts, first)], tokenizer, settings)
            if block.problems and options.on_error == "raise":
                raise UserError(str(block.problems[0]))
            first, found = first + len(texts), found or len(block.lengths) > 0
            bar.update(len(texts))
            yield block
    if not found and not may_be_empty:
        raise UserError(f"{split}: no documents in {first - 1} rows of the dataset")


def _batches(split: str, rows: Any, column: str) -> Iterator[list[str | None]]:
    """The values of the column, many at a time; a `datasets.Dataset` gives them without making its other columns."""
    if hasattr(rows, "with_format"):
        rows = rows.with_format(None)  # else it may give tensors
    if column not in (names := getattr(rows, "column_names", None) or [column]):
        raise _no_column(split, column, names)
    if hasattr(rows, "select_columns"):
        rows = rows.select_columns([column])
    if hasattr(rows, "iter"):
        batches: Iterable[Any] = (batch[column] for batch in rows.iter(batch_size=_BATCH))
    else:
        values = (_value(split, number, row, column) for number, row in enumerate(rows, start=1))
        batches = iter(lambda: list(itertools.islice(values, _BATCH)), [])
    first = 1
    for batch in batches:
        for number, text in enumerate(batch, start=first):
            if not isinstance(text, (str, type(None))):
                kind = type(text).__name__
                raise UserError(
                    f'{split}: row {number}: "{column}" holds a value of type {kind}, not text; choose another column'
                )
        first += len(batch)
        yield batch


def _value(split: str, number: int, row: Any, column: str) -> Any:
    if not isinstance(row, Mapping):
        raise UserError(
            f"{split}: row {number} is of type {type(row).__name__}; rows must be mappings, as {{'{column}': '...'}}"
        )
    if column not in row:
        raise _no_column(f"{split}: row {number}", column, row)
    return row[column]


def _no_column(where: str, column: str, names: Iterable[str]) -> UserError:
    return UserError(f'{where}: no column "{column}" (columns: {", ".join(map(str, names))}); choose one: column=...')


def _block(split: str, texts: list[str | None], first: int) -> Block:
    encoded = [b"" if text is None else text.encode("utf-8", "surrogatepass") for text in texts]
    sizes = [-1 if text is None else len(data) for text, data in zip(texts, encoded, strict=True)]
    return Block(split, ROWS, first, 0, b"".join(encoded), 0, sizes=np.array(sizes, dtype=np.int64))
