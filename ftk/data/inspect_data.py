"""Looking at a data folder: its numbers (`stats`) and whether it is what was written (`verify`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data.indexed.dataset import IndexedDataset
from ftk.data.indexed.folder_layout import SPLITS
from ftk.data.indexed.output_folder import RECORD, foreign_files, read_record
from ftk.errors import UserError, counted
from ftk.files import reason, sha256_of

_BAR_CHARACTERS = 40
_CHUNK_TOKENS = 1 << 22


def stats(folder: str | Path) -> str:
    """Counts of each split and a histogram of document lengths, drawn in characters.

    Args:
        folder: written by ftk-preprocess, or any folder of .bin/.idx pairs.

    Raises:
        UserError: it is no such folder, or one of its files is wrong.
    """
    folder = _data_folder(folder)
    parts = []
    for split in _splits(folder):
        dataset = IndexedDataset(folder / split)
        parts.append("\n".join(_describe(split, dataset)))
        dataset.check_files()
    return "\n\n".join(parts)


def verify(folder: str | Path) -> list[str]:
    """Compares the files of a data folder with its `preprocess.json` and with themselves.

    Args:
        folder: written by ftk-preprocess. Of one that Megatron or fairseq wrote, which has no
            `preprocess.json`, the indexes are checked.

    Returns:
        one line for each thing that is wrong; [] if nothing is.

    Raises:
        UserError: it is no folder, it holds no `.idx` file, or its `preprocess.json` is damaged.
    """
    folder = _data_folder(folder)
    try:
        record = read_record(folder)
        files: dict[str, dict[str, Any]] = record["files"]
        splits: dict[str, dict[str, Any]] = record["splits"]
        tokenizer: dict[str, Any] | None = record["tokenizer"]  # None: made by an earlier ftk from files that had none
        vocab_size, fingerprint = (tokenizer["vocab_size"], tokenizer["fingerprint"]) if tokenizer else (None, None)
    except FileNotFoundError:
        return [problem for split in _splits(folder) for problem in _wrong_split(folder, split, {}, None)]
    except (OSError, ValueError) as error:
        raise UserError(f"{folder / RECORD}: damaged ({reason(error)}); run ftk-preprocess again") from error
    problems = list(_wrong_files(folder, files))
    problems += [f"{folder / name}: not listed in {RECORD}" for name in foreign_files(folder)]
    for split, counts in splits.items():
        problems += _wrong_split(folder, split, counts, vocab_size)
    if fingerprint is not None and any(name.startswith("tokenizer/") for name in files):
        problems += _wrong_tokenizer(folder, fingerprint)
    return problems


def _data_folder(folder: str | Path) -> Path:
    folder = Path(folder)
    if not folder.exists():
        advice = "give one folder" if "," in str(folder) else f"ftk-preprocess --destdir {folder} would make it"
        raise UserError(f"{folder}: no such folder; {advice}")
    if not folder.is_dir():
        raise UserError(f"{folder}: a file; give the folder that ftk-preprocess wrote")
    return folder


def _splits(folder: Path) -> list[str]:
    """Names of the pairs in a folder: train, valid and test first."""
    names = sorted(path.stem for path in folder.glob("*.idx"))
    if not names:
        raise UserError(f"{folder}: holds no .idx file; give the folder that ftk-preprocess wrote")
    return [name for name in SPLITS if name in names] + [name for name in names if name not in SPLITS]


def _describe(split: str, dataset: IndexedDataset) -> Iterator[str]:
    sizes = dataset.sizes
    documents, sequences = counted(dataset.num_documents, "document", ","), counted(len(dataset), "sequence", ",")
    tokens = counted(dataset.num_tokens, "token", ",")
    yield f"{split}: {counted(len(dataset), 'document', ',')}, {tokens} ({dataset.dtype.name})"
    if dataset.num_documents != len(dataset):
        yield f"  {documents} in {sequences}; lengths are of sequences"
    if not len(dataset):
        return
    low, median, high = np.percentile(sizes, (5, 50, 95))
    yield (
        f"  tokens/document: mean {sizes.mean():.1f}, least {sizes.min():,}, 5 % {low:,.0f}, "
        f"median {median:,.0f}, 95 % {high:,.0f}, greatest {sizes.max():,}"
    )
    yield from _histogram(sizes)


def _histogram(sizes: npt.NDArray[np.int32]) -> Iterator[str]:
    """Rows for 0, 1, 2-3, 4-7, ... tokens: documents, share of all tokens, a bar for the documents."""
    doublings = np.frexp(sizes.astype(np.float64))[1]  # 0 for 0; k for 2^(k-1) to 2^k - 1
    documents = np.bincount(doublings)
    tokens = np.bincount(doublings, weights=sizes)
    first = int(np.flatnonzero(documents)[0])
    label_width = len(f"{1 << (len(documents) - 1):,}") * 2 + 1
    yield f"  {'tokens':>{label_width}}  {'documents':>13}  {'of all tokens':>13}"
    for k in range(first, len(documents)):
        label = "0" if k == 0 else "1" if k == 1 else f"{1 << (k - 1):,}-{(1 << k) - 1:,}"
        bar = "#" * int(np.ceil(_BAR_CHARACTERS * documents[k] / documents.max()))
        share = 100 * tokens[k] / max(tokens.sum(), 1)
        yield f"  {label:>{label_width}}  {documents[k]:>13,}  {share:>11.1f} %  {bar}".rstrip()


def _wrong_files(folder: Path, files: dict[str, dict[str, Any]]) -> Iterator[str]:
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{path}: missing"
        elif path.stat().st_size != expected["bytes"]:
            yield f"{path}: {path.stat().st_size} bytes, {RECORD} says {expected['bytes']}"
        elif "sha256" in expected and sha256_of(path) != expected["sha256"]:
            yield f"{path}: its sha256 is not the one in {RECORD}; the content has changed"


def _wrong_split(folder: Path, split: str, counts: dict[str, Any], vocab_size: int | None) -> Iterator[str]:
    try:
        dataset = IndexedDataset(folder / split)
        tokens = dataset.tokens
    except UserError as error:
        yield str(error)
        return
    for what, found in (("documents", dataset.num_documents), ("tokens", dataset.num_tokens)):
        if found != counts.get(what, found):
            yield f"{folder / split}: {found} {what}, {RECORD} says {counts[what]}"
    for start in range(0, tokens.size if vocab_size is not None else 0, _CHUNK_TOKENS):
        part = tokens[start : start + _CHUNK_TOKENS]
        dataset.check_files()
        if part.min() < 0 or part.max() >= vocab_size:
            wrong = part.min() if part.min() < 0 else part.max()
            yield f"{folder / split}.bin: holds token {wrong}, outside the vocabulary of {vocab_size}"
            return


def _wrong_tokenizer(folder: Path, fingerprint: str) -> Iterator[str]:
    from ftk.tokenizers import load_tokenizer

    try:
        found = load_tokenizer(folder).fingerprint
    except UserError as error:
        yield str(error)
        return
    if found != fingerprint:
        yield f"{folder / 'tokenizer'}: fingerprint {found[:12]}, {RECORD} says {fingerprint[:12]}"
