"""What `ftk-data convert` reads: splits of one or two sides, each a file of ids or a stream of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ftk.data.corpora.corpus import IndexedCorpusConfig, IndexedFolder, as_documents, has_tokenizer
from ftk.data.corpora.raw_corpus import RawCorpusConfig, read_pairs, read_texts
from ftk.data.corpora.raw_files import RawFiles, find_raw_files
from ftk.data.indexed.dataset import IndexedDataset
from ftk.data.indexed.folder_layout import SOURCE, TARGET
from ftk.data.text.files import MAX_DOCUMENT_BYTES
from ftk.errors import UserError
from ftk.tokenizers import Tokenizer, build_tokenizer, load_tokenizer

_CHUNK_TOKENS = 1 << 22


@dataclass(frozen=True)
class Side:
    """The documents of a split, or the sources or targets of one.

    Attributes:
        language: how this side is called; "" where there is only one.
        dataset: the ids, or None where there is text.
        texts: yields the documents as text; None where there are ids.
        tokenizer: made the ids, or is to make them; None if there is none.
    """

    language: str
    dataset: IndexedDataset | None
    texts: Callable[[], Iterator[str]] | None
    tokenizer: Tokenizer | None

    def decoded(self) -> Iterator[tuple[str, bool]]:
        """Each document as text, and whether that text gives the same ids again (text from a file always does)."""
        if self.texts is not None:
            yield from ((text, True) for text in self.texts())
            return
        assert self.dataset is not None
        assert self.tokenizer is not None
        documents = as_documents(self.dataset)
        eos = self.tokenizer.special.eos
        for number in range(len(documents)):
            ids = documents[number].tolist()
            if ids and ids[-1] == eos:
                ids.pop()
            text = self.tokenizer.decode(ids)
            yield text, self.tokenizer.encode(text) == ids


@dataclass(frozen=True)
class Source:
    """Everything that is converted.

    Attributes:
        kind: "ftk", "megatron", "fairseq" or "raw".
        splits: name -> one side, or source and target.
    """

    kind: str
    splits: dict[str, list[Side]]


def open_source(
    path: str,
    tokenizer_folder: str | None = None,
    source_lang: str | None = None,
    target_lang: str | None = None,
    text_key: str = "text",
    on_error: str = "raise",
    max_document_bytes: int = MAX_DOCUMENT_BYTES,
    remove_bpe: str = "none",
) -> Source:
    """A folder of `.bin/.idx` files, or text files as `--dataset raw` takes them.

    Args:
        path: the folder, or `[SPLIT=]FILE,...`.
        tokenizer_folder: tokenizer for data that holds none.
        source_lang, target_lang: which language pair, or the endings of text files.
        text_key, on_error, max_document_bytes: for text files, as of `--dataset raw`.
        remove_bpe: how symbols of a fairseq dictionary become text.

    Raises:
        UserError: there is nothing to convert.
    """
    folder = Path(path)
    if folder.is_dir() and any(folder.glob("*.idx")):
        return _open_indexed(folder, tokenizer_folder, source_lang, target_lang, remove_bpe)
    config = RawCorpusConfig(
        data=path,
        tokenizer_folder=tokenizer_folder or "",
        text_key=text_key,
        source_lang=source_lang or SOURCE,
        target_lang=target_lang or TARGET,
        on_error=on_error,
        max_document_bytes=max_document_bytes,
    )
    tokenizer = load_tokenizer(tokenizer_folder) if tokenizer_folder is not None else None
    splits = {}
    for split, files in find_raw_files(path, config.source_lang, config.target_lang).items():
        sides = [(config.source_lang, 0), (config.target_lang, 1)] if files.targets else [("", 0)]
        splits[split] = [Side(language, None, _reader(files, side, config), tokenizer) for language, side in sides]
    return Source("raw", splits)


def check_ids(side: Side, where: str, vocab_size: int) -> None:
    """Refuses ids that are not in the vocabulary: another tokenizer made them.

    Raises:
        UserError: names such an id.
    """
    assert side.dataset is not None
    assert side.tokenizer is not None
    if side.dataset.dtype.kind not in "iu":
        raise UserError(f"{where}: holds {side.dataset.dtype.name} numbers, no token ids")
    tokens = side.dataset.tokens
    for start in range(0, tokens.size, _CHUNK_TOKENS):
        part = tokens[start : start + _CHUNK_TOKENS]
        least, greatest = int(part.min()), int(part.max())
        if least < 0 or greatest >= vocab_size:
            wrong = least if least < 0 else greatest
            raise UserError(
                f"{where}: holds token {wrong}, outside the vocabulary of {vocab_size} "
                f"({side.tokenizer.name}); another tokenizer made these ids, give it by --tokenizer-folder"
            )


def _open_indexed(
    folder: Path, tokenizer_folder: str | None, source_lang: str | None, target_lang: str | None, remove_bpe: str
) -> Source:
    config = IndexedCorpusConfig(
        data=str(folder), tokenizer_folder=tokenizer_folder, source_lang=source_lang, target_lang=target_lang
    )
    corpus = IndexedFolder(config)
    tokenizers: list[Tokenizer | None] = [None, None]
    if tokenizer_folder is not None or has_tokenizer(folder) or any(folder.glob("dict*.txt")):
        tokenizers = [corpus.tokenizer(), corpus.target_tokenizer()]
    if remove_bpe != "none":
        tokenizers = [_with_bpe(tokenizer, remove_bpe) for tokenizer in tokenizers]
    splits = {}
    kind = "megatron"
    for split, files in corpus.files.items():
        names = [files.source] if files.target is None else [files.source, files.target]
        if files.target is not None:
            corpus.targets(split)  # as many as sources
        datasets = [IndexedDataset(folder / name) for name in names]
        languages = files.languages if files.target is not None else ("",)
        splits[split] = [
            Side(language, dataset, None, tokenizer)
            for language, dataset, tokenizer in zip(languages, datasets, tokenizers, strict=False)
        ]
        if any(dataset.dialect == "fairseq" for dataset in datasets):
            kind = "fairseq"
    return Source("ftk" if has_tokenizer(folder) else kind, splits)


def _with_bpe(tokenizer: Tokenizer | None, remove_bpe: str) -> Tokenizer:
    if tokenizer is None or tokenizer.name != "fairseq_dict":
        raise UserError("--remove-bpe is for data with fairseq's dict.txt; other tokenizers make words by themselves")
    return build_tokenizer("fairseq_dict", path=tokenizer.files[0].path, remove_bpe=remove_bpe)


def _reader(files: RawFiles, side: int, config: RawCorpusConfig) -> Callable[[], Iterator[str]]:
    def read() -> Iterator[str]:
        if not files.targets:
            yield from read_texts(files.sources, config)
            return
        for source, target in zip(files.sources, files.targets, strict=True):
            for pair in read_pairs(source, target, config):
                yield pair[side]

    return read


def narrowest(dataset: IndexedDataset, dialect: str) -> np.dtype:
    """The dataset's dtype, or for an unsigned one that Megatron lacks, the signed one that holds its ids."""
    dtype = dataset.dtype
    if dialect == "fairseq" or dtype not in (np.dtype("<u4"), np.dtype("<u8")):
        return dtype
    tokens = dataset.tokens
    chunks = range(0, tokens.size, _CHUNK_TOKENS)
    greatest = max((int(tokens[start : start + _CHUNK_TOKENS].max()) for start in chunks), default=0)
    return np.dtype("<i4") if greatest <= np.iinfo(np.int32).max else np.dtype("<i8")
