"""Writing encoded documents: repeats left out, shares held out for other splits, checksums as they are written."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from ftk.data.indexed.dataset import IndexedDatasetWriter
from ftk.data.text.encoding import EncodedBlock, select


class SplitWriter:
    """Writes the documents of one split, and those held out of it, to a folder.

        with SplitWriter(folder, "train", {"valid": 0.01}, dtype, dedup=True) as writer:
            writer.add(block)

    Which documents are written, and where, depends on them and their order alone, not on their division into blocks.

    Args:
        folder: where the `.bin` and `.idx` files go.
        split: name of the split.
        held_out: name -> share of the documents that go to that split instead, by the hash of their text.
        dtype: dtype of the tokens.
        dedup: leave out documents whose hash occurred before.
        keep_hashes: write the hashes of the documents, too, uint64, to `NAME.hashes`: other parts of the split, written
            elsewhere, may hold the same documents.

    Attributes:
        documents, tokens: split -> how many were written.
        duplicates: documents left out.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        held_out: Mapping[str, float],
        dtype: np.dtype[Any],
        *,
        dedup: bool = False,
        keep_hashes: bool = False,
    ) -> None:
        self._held_out = dict(held_out)
        self._split = split
        self._seen: set[int] | None = set() if dedup else None
        self._writers = {name: IndexedDatasetWriter(folder / name, dtype) for name in (split, *held_out)}
        self._digests = {name: hashlib.sha256() for name in self._writers}
        self._hash_paths = {name: hashes_path(folder, name) for name in self._writers if keep_hashes}
        self._hash_files: dict[str, BinaryIO] = {}
        self._open = contextlib.ExitStack()
        self.documents = dict.fromkeys(self._writers, 0)
        self.tokens = dict.fromkeys(self._writers, 0)
        self.duplicates = 0

    def __enter__(self) -> SplitWriter:
        with contextlib.ExitStack() as stack:
            for writer in self._writers.values():
                stack.enter_context(writer)
            for name, path in self._hash_paths.items():
                self._hash_files[name] = stack.enter_context(open(path, "xb"))
            self._open = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def add(self, block: EncodedBlock) -> None:
        """Writes the documents of a block, which has hashes if repeats are left out or shares are held out."""
        arrays = block.tokens, block.lengths, block.hashes
        if self._seen is not None:
            new = add_new(self._seen, block.hashes)
            self.duplicates += new.size - int(new.sum())
            arrays = select(new, *arrays)
        for name, mask in self._shares(arrays[2], len(arrays[1])):
            tokens, lengths, hashes = select(mask, *arrays)
            if name in self._hash_files:
                self._hash_files[name].write(hashes.astype("<u8").data)
            self._writers[name].add_documents(tokens, lengths)
            self._digests[name].update(np.ascontiguousarray(tokens).data)
            self.documents[name] += len(lengths)
            self.tokens[name] += len(tokens)

    def checksums(self) -> dict[str, str]:
        """File name -> sha256 of what was written to it, so that these files need not be read again."""
        return {f"{name}.bin": digest.hexdigest() for name, digest in self._digests.items()}

    def _shares(
        self, hashes: npt.NDArray[np.uint64], num_documents: int
    ) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
        rest = np.ones(num_documents, dtype=np.bool_)
        for name, mask in held_out_documents(hashes, self._held_out):
            yield name, mask
            rest &= ~mask
        yield self._split, rest


def hashes_path(folder: Path, name: str) -> Path:
    """The file of the hashes of a split's documents."""
    return folder / f"{name}.hashes"


def add_new(seen: set[int], hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    """Adds hashes to `seen`; returns whether each was new, [hashes]: of equal ones among them only the first."""
    before = len(seen)
    new = np.zeros(len(hashes), dtype=np.bool_)
    for number, value in enumerate(hashes.tolist()):
        seen.add(value)
        new[number] = len(seen) > before
        before = len(seen)
    return new


def held_out_documents(
    hashes: npt.NDArray[np.uint64], held_out: Mapping[str, float]
) -> Iterator[tuple[str, npt.NDArray[np.bool_]]]:
    """Which documents each split gets: equal texts the same, and the first split does not depend on the others.

    Args:
        hashes: of their texts, [documents] uint64.
        held_out: split -> share of all documents; together below 1.

    Yields:
        (split, [documents] bool); no document is in two of them.
    """
    start = 0.0
    for name, share in held_out.items():
        low, high = (np.uint64(int(bound * 2**64)) for bound in (start, start + share))
        yield name, (hashes >= low) & (hashes < high)
        start += share
