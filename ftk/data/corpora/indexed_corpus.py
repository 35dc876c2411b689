"""The corpus `indexed`: folders of `.bin/.idx` files, with the tokenizer that made their ids."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from ftk.config.options import option, required
from ftk.data.corpora.composition import ComposedCorpus, CompositionConfig
from ftk.data.corpora.documents import TokenizedDocuments
from ftk.data.indexed.check import SLICE, forget_pages
from ftk.data.indexed.dataset import IndexedDataset
from ftk.data.indexed.file_map import check_files
from ftk.data.indexed.folder_layout import NoSplit, find_pairs, find_splits, sides_of
from ftk.data.indexed.output_folder import RECORD, read_record
from ftk.data.supervised.rows import split_of
from ftk.errors import UserError, download_hint
from ftk.files import reason
from ftk.registry import TASKS, register_dataset
from ftk.tokenizers import find_description, load_tokenizer
from ftk.tokenizers.base import Tokenizer
from ftk.tokenizers.fairseq_dict import dictionaries
from ftk.tokenizers.files import DESCRIPTION


class GroupedDocuments(TokenizedDocuments):
    """Documents of several sequences each, as Megatron writes sentences; a document is a view of the file.

    Args:
        dataset: the sequences, with their document index.
    """

    def __init__(self, dataset: IndexedDataset) -> None:
        self.dataset = dataset
        ends = np.concatenate(([0], np.cumsum(dataset.sizes, dtype=np.int64)))
        sizes = np.diff(ends[dataset.document_index])
        if sizes.size and sizes.max() > np.iinfo(np.int32).max:
            raise UserError(f"{dataset.prefix}: document {sizes.argmax()} has {sizes.max()} tokens, above 2147483647")
        super().__init__(dataset.tokens, sizes.astype(np.int32))

    def __reduce__(self) -> tuple[type[GroupedDocuments], tuple[IndexedDataset]]:
        return GroupedDocuments, (self.dataset,)  # a worker opens the files itself


class PairedDocuments:
    """The two sides of a translation, as fairseq writes them: a document is a text and its translation behind it.

    Args:
        source, target: sequences, of which each ends with the end token.

    Raises:
        UserError: there are not as many of one as of the other.
    """

    def __init__(self, source: IndexedDataset, target: IndexedDataset) -> None:
        if len(source) != len(target):
            raise UserError(
                f"{source.prefix} has {len(source)} sequences, {target.prefix} {len(target)}; they are no translations "
                f"of each other"
            )
        self.source, self.target = source, target
        self.sizes = np.asarray(source.sizes) + np.asarray(target.sizes)  # [D]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        return np.concatenate((self.source[index], self.target[index]))

    def check_files(self) -> None:
        """Raises OSError if a file has become shorter."""
        check_files(self.source, self.target)


@dataclass(kw_only=True)
class IndexedCorpusConfig(CompositionConfig):
    RETIRED: ClassVar[dict[str, Any]] = {"source_lang": None, "target_lang": None, "index_cache": ...}

    data: str = required(
        "folder written by ftk-preprocess, Megatron or fairseq, or several to blend: A,B; A:B: shards, one per epoch; "
        "for tasks that read rows a folder with train.jsonl, or train.source and train.target",
        positional=True,
        metavar="DATA",
        path=True,
    )
    tokenizer_folder: str | None = option(
        None,
        "tokenizer of data that holds none, as Megatron's: a folder that ftk wrote one to (a data folder, a "
        "checkpoint)",
        metavar="DIR",
    )


@register_dataset("indexed", config=IndexedCorpusConfig)
class IndexedCorpus(ComposedCorpus):
    """One folder of `.bin/.idx` pairs, or several (see `ComposedCorpus`).

    Raises:
        UserError: as `ComposedCorpus` and `IndexedFolder` do.
    """

    def __init__(self, config: IndexedCorpusConfig) -> None:
        def open_folder(path: str) -> IndexedFolder:
            return IndexedFolder(dataclasses.replace(config, data=path))

        super().__init__(config.data, config, open_folder)


class IndexedFolder:
    """A folder of `.bin/.idx` pairs: ours, Megatron's (with `tokenizer_folder`) or fairseq's (with its dict.txt).

    Raises:
        UserError: the folder is missing, is no such folder, or its tokenizer is not the one that made the ids.
    """

    def __init__(self, config: IndexedCorpusConfig) -> None:
        self.config = config
        self.folder = Path(config.data)
        if not self.folder.exists():
            raise UserError(f"{config.data}: no such data folder{_advice_for_missing(config.data)}")
        self.files = find_splits(self.folder) if self.folder.is_dir() else {}
        if not self.files:
            raise UserError(f"{self.folder} holds no .idx file; {_advice_for(self.folder)}")
        self.pairs = find_pairs(self.files)

    def splits(self) -> Sequence[str]:
        return sorted([*self.files, *self.pairs])

    def documents(self, split: str) -> IndexedDataset | GroupedDocuments | PairedDocuments:
        if split in self.pairs:
            return PairedDocuments(*(IndexedDataset(self.folder / name) for name in self.pairs[split]))
        if split not in self.files:
            raise NoSplit(f"{self.folder} has no split {split!r}; there are: {', '.join(self.splits())}")
        dataset = IndexedDataset(self.folder / self.files[split])
        if len(dataset) == 0:
            raise UserError(f"{self.folder / self.files[split]}.idx holds no documents")
        return as_documents(dataset)

    def tokenizer(self) -> Tokenizer:
        if self.config.tokenizer_folder is not None:
            tokenizer = load_tokenizer(self.config.tokenizer_folder)
        elif has_tokenizer(self.folder):
            tokenizer = load_tokenizer(self.folder)
        elif any(self.folder.glob("dict*.txt")):
            return self._fairseq_dictionaries()
        else:
            raise UserError(
                f"{self.folder} holds no tokenizer (neither tokenizer/ nor fairseq's dict.txt); "
                "give the one that made the ids by `tokenizer_folder`"
            )
        made_with = self._recorded_fingerprint()
        if made_with is not None and made_with != tokenizer.fingerprint:
            raise UserError(
                f"{self.config.tokenizer_folder or self.folder / 'tokenizer'} is not the tokenizer that made this data "
                f"({self.folder / RECORD} says {made_with[:12]}, found {tokenizer.fingerprint[:12]}); "
                "run ftk-preprocess again"
            )
        return tokenizer

    @cached_property
    def tokenizer_folder(self) -> Path:
        given = self.config.tokenizer_folder
        if given is not None or has_tokenizer(self.folder):
            return find_description(given or self.folder).parent
        # A fairseq folder has its dict.txt among the data; a checkpoint wants it alone.
        return self.tokenizer().saved_for(self)

    def _fairseq_dictionaries(self) -> Tokenizer:
        """The dictionary of a fairseq folder; of translations that of the targets with that of the sources."""
        found = {sides_of(names[0]) for names in self.pairs.values()}
        return dictionaries(self.folder, (*found.pop(),) if len(found) == 1 else ())

    def _recorded_fingerprint(self) -> str | None:
        try:
            tokenizer = read_record(self.folder)["tokenizer"]
        except FileNotFoundError:  # files made by Megatron or fairseq have none
            return None
        except (OSError, ValueError) as error:
            path = self.folder / RECORD
            raise UserError(f"{path} is damaged ({reason(error)}); run ftk-data verify {self.folder}") from error
        return None if tokenizer is None else tokenizer["fingerprint"]


def as_documents(dataset: IndexedDataset) -> IndexedDataset | GroupedDocuments:
    """The dataset itself where each document is one sequence, as ftk writes them."""
    if dataset.num_documents != len(dataset):
        return GroupedDocuments(dataset)
    if dataset.dialect != "fairseq":
        dataset.check()
        at = dataset.layout.marks_at
        for first in range(0, len(dataset), SLICE):  # 0, 1, 2, ...? Empty documents can make up the number
            count = min(SLICE, len(dataset) - first)
            marks = np.frombuffer(dataset.index, "<i8", count=count, offset=at + 8 * first)
            if not np.array_equal(marks, np.arange(first, first + count)):
                return GroupedDocuments(dataset)
            forget_pages(dataset.index, at + 8 * first, at + 8 * (first + count))
    return dataset


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder keeps a tokenizer that ftk has saved."""
    try:
        find_description(folder)
    except UserError:
        return False
    return True


def _advice_for_missing(data: str) -> str:
    if Path(f"{data}.idx").is_file():  # as Megatron-LM names data
        folder, split = Path(data).parent, Path(data).name
        return f"; give the folder {folder}, of which this is a split (in training `train_subset` {split})"
    folders = [word for word in data.split() if Path(word).is_dir()]
    if len(folders) > 1:
        return f"; to blend folders write {','.join(folders)}, and their shares by `data_weights`"
    advice = "" if "://" in data else f"; make one with ftk-preprocess --destdir {data}"
    return advice + download_hint(data, "dataset")


def _advice_for(folder: Path) -> str:
    if not folder.is_dir():
        return "give a folder written by ftk-preprocess"
    names = sorted(path.name for path in folder.iterdir())
    if "config.yaml" in names or "config.json" in names:
        return "it is a run or a model; give a folder written by ftk-preprocess"
    if DESCRIPTION in names:
        return f"it is a tokenizer; give {folder.parent if find_splits(folder.parent) else 'a data folder'}"
    if texts := [name for name in names if name.startswith("train.txt")]:
        return f"it has texts ({texts[0]}); read them with `dataset` raw, or make a data folder with ftk-preprocess"
    rows = [name for name in names if split_of(name) is not None]
    if not rows:
        return "give a folder written by ftk-preprocess"
    tasks = ", ".join(name for name in TASKS.names() if TASKS.get(name).dataset == "rows")
    return (
        f"it has rows ({rows[0]}), which these tasks read: {tasks}; choose one by `task`, or ftk-preprocess the texts"
    )
