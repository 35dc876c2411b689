"""Dividing one split into train, valid and test when it is read, by a fixed seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora.documents import Documents
from ftk.data.indexed.file_map import check_files
from ftk.data.indexed.folder_layout import SPLITS
from ftk.data.random import SampleRandom


class DocumentSubset:
    """Some of a corpus's documents. Where all lie back to back in one array, samples are read from there.

    Args:
        numbers: int64 [D], which.
    """

    def __init__(self, documents: Documents, numbers: NDArray[np.int64]) -> None:
        self.documents = documents
        self.numbers = numbers
        self.sizes = np.asarray(documents.sizes)[numbers]  # [D]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        return self.documents[int(self.numbers[index])]

    def __reduce__(self) -> tuple[type[DocumentSubset], tuple[Documents, NDArray[np.int64]]]:
        return DocumentSubset, (self.documents, self.numbers)  # the rest follows from them

    def check_files(self) -> None:
        """Raises OSError if the file of the documents has become shorter."""
        check_files(self.documents)

    @property
    def pool(self) -> NDArray[np.integer] | None:
        """The array that holds these documents, with others between them; None if there is none."""
        return self._placed[0]

    @property
    def starts(self) -> NDArray[np.int64]:
        """Where in `pool` each document begins, [D]."""
        return self._placed[1]

    @cached_property
    def _placed(self) -> tuple[NDArray[np.integer] | None, NDArray[np.int64]]:
        if isinstance(self.documents, DocumentSubset):
            return self.documents.pool, self.documents.starts[self.numbers]
        tokens = getattr(self.documents, "tokens", None)
        ends = np.cumsum(self.documents.sizes, dtype=np.int64)
        if not isinstance(tokens, np.ndarray) or len(ends) == 0 or len(tokens) != ends[-1]:
            tokens = None
        return tokens, ends[self.numbers] - self.sizes


class JoinedDocuments:
    """Documents of several sources, one after the other.

    Args:
        sources: at least one.
    """

    def __init__(self, sources: Sequence[Documents]) -> None:
        self.sources = tuple(sources)
        self.sizes = np.concatenate([np.asarray(source.sizes) for source in sources])  # [D]
        self._ends = np.cumsum([len(source) for source in sources])

    def check_files(self) -> None:
        """Raises OSError if the file of a source has become shorter."""
        check_files(*self.sources)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> NDArray[np.integer]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self.sources[number][index - (int(self._ends[number - 1]) if number else 0)]


def split_sizes(count: int, ratios: Sequence[float]) -> list[int]:
    """How many of `count` documents each split gets: the ratios rounded, each split with a ratio at least one."""
    bounds = np.rint(np.cumsum([0.0, *ratios]) / sum(ratios) * count).astype(np.int64)
    sizes = np.diff(bounds).tolist()
    for number, ratio in enumerate(ratios):
        if ratio > 0 and sizes[number] == 0 and max(sizes) > 1:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[number] = 1
    return sizes


def split_documents(documents: Documents, ratios: Sequence[float], seed: int) -> dict[str, DocumentSubset]:
    """Divides documents at random; the same seed divides the same number of documents the same way.

    Args:
        ratios: of train, valid and test, any scale; fewer than three: the last ones do not exist.
        seed: of the division, apart from the run's seed: another seed must not train on what was held out.

    Returns:
        Name -> documents, in their order in the corpus; without splits that have none.
    """
    count = len(documents)
    bounds = np.cumsum([0, *split_sizes(count, ratios)])
    numbers = SampleRandom(seed, 0, 0).permutation(count)
    return {
        name: DocumentSubset(documents, np.sort(numbers[start:stop]))
        for name, start, stop in zip(SPLITS, bounds, bounds[1:], strict=False)
        if stop > start
    }
