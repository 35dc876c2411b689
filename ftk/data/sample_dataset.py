"""What a dataset of samples offers to the iterator."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ftk.data.indexed.file_map import check_files

Made = TypeVar("Made", bound="BatchedDataset")


class SampleDataset(Protocol):
    """Samples of one split; a sample is a pure function of (seed, epoch, index).

    A dataset may also have

    - `samples(epoch, indices)`: a sequence of several samples made in one call;
    - `epoch_order(epoch)`: int64 [N] indices and int32 [N] sizes, its own order, used where samples are shuffled.
      Indices in it may go beyond 0 .. len - 1;
    - `check_files()`: raises OSError if a file that samples are made of has become shorter (`file_map`); called
      after each batch;
    - `questions`: a sequence of what ftk-generate asks instead of samples, for `TextGenerator.encode_sample`;
    - `most_rows`: of a batch, that one sample may take, where `sizes` count as many rows for each; a blend sets that of
      all its corpora;
    - `lengths`: the numbers of samples of successive epochs, repeating, where they differ;
    - `shortened(share)`: the same dataset with texts of at most a share of their length, for a curriculum; None if
      its texts are not packed to one length.
    """

    def __len__(self) -> int:
        """Samples in an epoch."""

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        """One sample as NumPy arrays and numbers."""

    def sizes(self, epoch: int) -> NDArray[np.integer]:
        """int32 [len]: the most tokens that each sample of this epoch can have, for batching."""


class BatchedDataset(ABC):
    """A `SampleDataset` that makes several samples in one call.

    Attributes:
        texts: what they are made of, one for each unless the class says otherwise; `shortened` and `check_files` of it
            are those of the dataset.
    """

    texts: Any

    def __len__(self) -> int:
        return len(self.texts)

    def sample(self, epoch: int, index: int) -> dict[str, NDArray]:
        """One sample, as `samples` makes it."""
        return self.samples(epoch, np.array([index], dtype=np.int64))[0]

    @abstractmethod
    def samples(self, epoch: int, indices: NDArray[np.int64]) -> Sequence[dict[str, NDArray]]:
        """Several samples."""

    def shortened(self: Made, share: float) -> Made | None:
        """Samples of texts that begin as these do, and end at a share of the length; None where texts have none."""
        texts = shortened(self.texts, share)
        if texts is None:
            return None
        made = copy.copy(self)
        made.texts = texts
        return made

    def check_files(self) -> None:
        """Raises OSError if a file of the corpus has become shorter."""
        check_files(self.texts)


def samples_of(dataset: SampleDataset, epoch: int, indices: NDArray[np.int64]) -> Sequence[dict[str, Any]]:
    """Several samples, made in one call where the dataset has one for many."""
    make_many = getattr(dataset, "samples", None)
    if make_many is not None:
        return make_many(epoch, indices)
    return [dataset.sample(epoch, int(index)) for index in indices]


def check_indices(indices: NDArray[np.integer], count: int) -> None:
    """Raises IndexError if an index is not of one of `count` samples."""
    wrong = indices[(indices < 0) | (indices >= count)]
    if len(wrong):
        raise IndexError(f"sample {wrong[0]} of {count}")


def shortened(dataset: SampleDataset, share: float) -> SampleDataset | None:
    """The dataset with texts of at most a share of their length; None if it has no such form."""
    make = getattr(dataset, "shortened", None)
    return None if make is None else make(share)


def shortened_length(length: int, share: float) -> int:
    """A share of a length: a multiple of 8, so that there are few shapes, and at least 16 if the length is."""
    return min(length, max(16, int(share * length) // 8 * 8))


def lengths_of(dataset: SampleDataset) -> NDArray[np.int64]:
    """Samples of successive epochs of a dataset, repeating: one number, or one for each shard."""
    return np.asarray(getattr(dataset, "lengths", [len(dataset)]), dtype=np.int64)
