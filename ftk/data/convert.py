"""Converting corpora: ids between ftk's, Megatron's and fairseq's files, and ids to text and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ftk.data.convert_fairseq import FairseqVocabulary
from ftk.data.convert_sources import Side, Source, check_ids, narrowest
from ftk.data.indexed._index import flatten
from ftk.data.indexed.dataset import IndexedDataset, IndexedDatasetWriter, optimal_dtype
from ftk.data.indexed.file_map import check_files
from ftk.data.indexed.folder_layout import SOURCE, TARGET
from ftk.data.indexed.output_folder import describe_files, whole_folder, write_record
from ftk.errors import UserError, counted
from ftk.tokenizers import Tokenizer
from ftk.version import __version__

KINDS = ("ftk", "megatron", "fairseq", "jsonl", "text")
_BATCH = 1000  # documents encoded at a time


def convert(source: Source, origin: str, destination: str, to: str, *, overwrite: bool, keep_ids: bool = False) -> str:
    """Writes a corpus in another form, whole or not at all.

    Args:
        source: what to convert.
        origin: its path, for messages and the record.
        destination: folder to make.
        to: one of `KINDS`.
        overwrite: replace a folder that ftk has written.
        keep_ids: for "fairseq": the ids as they are, without a dictionary.

    Returns:
        lines for people: what was written.

    Raises:
        UserError: there is no tokenizer where one is needed, the ids are not its, a number or a text does not fit
            the form, or the destination is wrong.
    """
    target = Path(destination)
    if Path(origin).exists() and target.exists() and target.samefile(origin):
        raise UserError(f"{destination}: is what is to be converted; choose another folder")
    if keep_ids and to != "fairseq":
        raise UserError("--keep-ids is for --to fairseq; all other forms keep the ids anyhow")
    with whole_folder(target, overwrite, name=destination) as folder:
        work = _Conversion(source, origin, folder, to, keep_ids)
        lines = work.run()
        check_files(*(side.dataset for sides in source.splits.values() for side in sides))
        record = {
            "ftk_version": __version__,
            "settings": {"converted_from": source.kind, "converted_to": to},
            "tokenizer": work.tokenizer_record(),
            "dtype": work.dtype,
            "splits": work.splits,
            "files": describe_files(folder, {}) if to == "ftk" else _file_sizes(folder),
        }
        write_record(folder, record)
    return "\n".join([*lines, f"written: {destination}"])


class _Conversion:
    """One conversion into an open folder; holds what its record says."""

    def __init__(self, source: Source, origin: str, folder: Path, to: str, keep_ids: bool) -> None:
        self.source = source
        self.origin = origin
        self.folder = folder
        self.to = to
        self.keep_ids = keep_ids
        self.splits: dict[str, dict[str, Any]] = {}
        self.dtype: str | None = None
        self.vocabularies: dict[str, FairseqVocabulary] = {}

    def run(self) -> list[str]:
        """Writes everything; returns a line for each file."""
        return [line for split, sides in self.source.splits.items() for line in self._split(split, sides)]

    def tokenizer_record(self) -> dict[str, Any] | None:
        tokenizer = self._tokenizer()
        if tokenizer is None or self.to not in ("ftk", "megatron"):
            return None
        return {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}

    def _split(self, split: str, sides: list[Side]) -> Iterator[str]:
        for number, side in enumerate(sides):
            name = self._name(split, sides, number)
            where = f"{self.origin}: {split}{'.' if side.language else ''}{side.language}"
            if self.to in ("jsonl", "text"):
                yield self._write_text(name, side, where, paired=len(sides) > 1)
            else:
                yield self._write_ids(name, side, where, paired=len(sides) > 1)
        if self.to == "ftk" and not (self.folder / "tokenizer").exists():
            self._save_tokenizer(sides)
        for language, vocabulary in self.vocabularies.items():
            vocabulary.write(self.folder / (f"dict.{language}.txt" if language else "dict.txt"))

    def _name(self, split: str, sides: list[Side], number: int) -> str:
        if len(sides) == 1:
            return split
        languages = sides[0].language, sides[1].language
        if self.to == "fairseq":
            return f"{split}.{languages[0]}-{languages[1]}.{languages[number]}"
        return f"{split}.{languages[number] if self.to == 'text' else (SOURCE, TARGET)[number]}"

    def _write_ids(self, name: str, side: Side, where: str, paired: bool) -> str:
        fairseq = self.to == "fairseq"
        if side.tokenizer is None and (side.dataset is None or self.to == "ftk" or (fairseq and not self.keep_ids)):
            hint = ", or write the ids as they are with --keep-ids" if fairseq and side.dataset is not None else ""
            raise UserError(f"{where}: --to {self.to} needs its tokenizer; give it by --tokenizer-folder{hint}")
        if side.dataset is not None and side.tokenizer is not None and not self.keep_ids:
            fixed = fairseq and side.tokenizer.name == "fairseq_dict"  # its dict.txt is all that there will be
            check_ids(side, where, side.tokenizer.num_text_tokens if fixed else side.tokenizer.vocab_size)
        vocabulary = self._vocabulary(side) if fairseq and not self.keep_ids else None
        dialect = "fairseq" if fairseq else "megatron"
        with IndexedDatasetWriter(
            self.folder / name, self._dtype(side, vocabulary, dialect), dialect=dialect
        ) as writer:
            if side.dataset is not None and (vocabulary is None or vocabulary.kept):
                writer.add_dataset(side.dataset)
            else:
                for tokens, lengths in _batches_of_ids(side, paired):
                    if vocabulary is not None:
                        tokens, lengths = vocabulary.translate(tokens, lengths)
                    writer.add_documents(tokens, lengths)
        written = IndexedDataset(self.folder / name)
        self.dtype = self.dtype or written.dtype.name
        self.splits[name] = {"documents": written.num_documents, "tokens": written.num_tokens}
        documents = counted(written.num_documents, "document", ",")
        return f"{name}: {documents}, {counted(written.num_tokens, 'token', ',')} ({written.dtype.name})"

    def _dtype(self, side: Side, vocabulary: FairseqVocabulary | None, dialect: str) -> np.dtype[Any]:
        if vocabulary is not None and not (vocabulary.kept and side.dataset is not None):
            return optimal_dtype(vocabulary.size)
        if side.dataset is not None:
            return narrowest(side.dataset, dialect)
        assert side.tokenizer is not None
        return optimal_dtype(side.tokenizer.vocab_size)

    def _vocabulary(self, side: Side) -> FairseqVocabulary:
        """One dictionary for all splits; for pairs, one for each side."""
        assert side.tokenizer is not None
        if side.language not in self.vocabularies:
            self.vocabularies[side.language] = FairseqVocabulary(side.tokenizer)
        return self.vocabularies[side.language]

    def _write_text(self, name: str, side: Side, where: str, paired: bool) -> str:
        if paired and self.to == "jsonl":
            raise UserError(f"{where}: pairs of source and target become --to text (or ftk, megatron, fairseq)")
        if side.dataset is not None:
            if side.tokenizer is None:
                raise UserError(f"{where}: --to {self.to} needs the tokenizer; give it by --tokenizer-folder")
            check_ids(side, where, side.tokenizer.vocab_size)
        path = self.folder / (name if paired else f"{name}.{'jsonl' if self.to == 'jsonl' else 'txt'}")
        count = changed = 0
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for text, same in side.decoded():
                if self.to == "text":
                    _check_line(text, where, count)
                file.write((json.dumps({"text": text}, ensure_ascii=False) if self.to == "jsonl" else text) + "\n")
                count += 1
                changed += not same
        self.splits[name] = {"documents": count}
        note = f"; of {changed:,} the text does not give the same ids again" if changed else ""
        return f"{path.name}: {counted(count, 'document', ',')}{note}"

    def _save_tokenizer(self, sides: list[Side]) -> None:
        tokenizer = sides[0].tokenizer
        assert tokenizer is not None
        if any(side.tokenizer is None or side.tokenizer.fingerprint != tokenizer.fingerprint for side in sides):
            raise UserError(
                f"{self.origin}: source and target have dictionaries of their own, and an ftk folder holds one "
                "tokenizer; encode the text again with ftk-preprocess, or make the dictionary a joined one"
            )
        tokenizer.save(self.folder / "tokenizer")

    def _tokenizer(self) -> Tokenizer | None:
        return next(iter(self.source.splits.values()))[0].tokenizer


def _batches_of_ids(side: Side, paired: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(tokens, lengths) of some documents at a time. Documents without tokens go, unless their places matter."""
    if side.dataset is not None:
        for first in range(0, len(side.dataset), _BATCH):
            chosen = np.arange(first, min(first + _BATCH, len(side.dataset)))
            tokens, offsets = side.dataset.gather_packed(chosen)
            yield tokens, np.diff(offsets)
        return
    assert side.texts is not None
    assert side.tokenizer is not None
    texts = side.texts()
    dtype = optimal_dtype(side.tokenizer.vocab_size)
    while batch := list(itertools.islice(texts, _BATCH)):
        rows = side.tokenizer.encode_batch(batch)
        yield flatten(rows if paired else [row for row in rows if row], dtype)


def _check_line(text: str, where: str, number: int) -> None:
    """Refuses a text that would not come back from a file of lines."""
    if "\n" in text or text.endswith("\r") or not text.strip() or (number == 0 and text.startswith("\ufeff")):
        what = "holds a line end" if "\n" in text else "begins or ends with what a line loses, or is empty"
        raise UserError(f"{where}: document {number} {what}, so that it cannot be a line; use --to jsonl")


def _file_sizes(folder: Path) -> dict[str, dict[str, Any]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size} for path in files}
