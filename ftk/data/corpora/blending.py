"""Blending: samples of several corpora in one stream, in the given proportions at every place of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.data.corpora._blending import blend_corpora
from ftk.data.indexed.file_map import check_files
from ftk.data.random import SampleRandom
from ftk.data.sample_dataset import SampleDataset, lengths_of, samples_of, shortened

_PASS_STREAM = -2  # minus the corpus's number: the stream that orders its passes


@dataclass(frozen=True)
class Part:
    """One corpus of a blend.

    Attributes:
        name: for people.
        tokens: of its documents, all shards together.
        dataset: its samples.
    """

    name: str
    tokens: int
    dataset: SampleDataset


@dataclass(frozen=True)
class Share:
    """What a blend takes of one corpus: its part of the samples, and passes over it in one epoch of the blend."""

    part: Part
    weight: float
    samples: int
    passes: float


class BlendedDataset:
    """Several corpora as one; each is read evenly, pass after pass, in proportion to its weight.

    An epoch has as many samples as all corpora together. A corpus whose share of them is larger than the corpus starts
    again, in a new order and with new random draws; one with a smaller share continues in the next epoch where it
    stopped in this one. So no sample comes twice before all of its corpus have come.

    An index below `len(self)` is a sample of the corpora one after the other, as a validation goes through them. The
    indices of `epoch_order`, which training uses, lie above and say corpus, pass and sample.

    Args:
        weights: share of each; any scale, none negative.
        seed: of the order of each pass.
    """

    def __init__(self, parts: Sequence[Part], weights: Sequence[float], seed: int) -> None:
        self.parts = tuple(parts)
        self.seed = seed
        counting = [part.dataset for part in parts if hasattr(part.dataset, "most_rows")]
        for dataset in counting:  # a batch may hold samples of them all
            dataset.most_rows = max(other.most_rows for other in counting)
        self.cycles = [lengths_of(part.dataset) for part in parts]  # lengths of successive passes, repeating
        self.shares = np.array(weights, dtype=np.float64)  # [K]
        self.shares /= self.shares.sum()
        means = [-(-int(cycle.sum()) // len(cycle)) for cycle in self.cycles]
        self.samples_per_epoch = sum(means)
        self.firsts = np.cumsum([0, *(len(part.dataset) for part in parts)])  # [K + 1], of the plain indices
        self.rooms = np.cumsum([0, *(int(cycle.max()) for cycle in self.cycles)])  # [K + 1], of one pass of each
        self.corpora = blend_corpora(self.shares, self.samples_per_epoch)  # uint16 [samples_per_epoch]
        self.counts = np.bincount(self.corpora, minlength=len(parts))  # [K], samples of an epoch

    def __len__(self) -> int:
        """Samples of the first pass over every corpus."""
        return int(self.firsts[-1])

    def sizes(self, epoch: int) -> NDArray[np.integer]:
        """[len], of the plain indices."""
        passes = [self._place(number, epoch)[0] for number in range(len(self.parts))]
        found = [part.dataset.sizes(at + 1) for part, at in zip(self.parts, passes, strict=True)]
        return np.concatenate([np.resize(own, len(part.dataset)) for own, part in zip(found, self.parts, strict=True)])

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        """A sample by a plain index, or by one of `epoch_order`."""
        number, at, place = self._find(epoch, index)
        return self.parts[number].dataset.sample(at + 1, place)

    def samples(self, epoch: int, indices: NDArray[np.int64]) -> Sequence[dict[str, Any]]:
        """Several samples; those of one pass over one corpus are made together."""
        found = [self._find(epoch, int(index)) for index in indices]
        groups: dict[tuple[int, int], list[int]] = {}
        for row, (number, at, _) in enumerate(found):
            groups.setdefault((number, at), []).append(row)
        made: list[dict[str, Any]] = [{}] * len(found)
        for (number, at), rows in groups.items():
            places = np.array([found[row][2] for row in rows], dtype=np.int64)
            several = samples_of(self.parts[number].dataset, at + 1, places)
            if len(groups) == 1:
                return several
            for row, sample in zip(rows, several, strict=True):
                made[row] = sample
        return made

    @property
    def questions(self) -> Sequence[Any] | None:
        """See `SampleDataset`, of one corpus after the other; None if one has none."""
        found: list[Any] = [getattr(part.dataset, "questions", None) for part in self.parts]
        return None if any(own is None for own in found) else [question for own in found for question in own]

    def shortened(self, share: float) -> BlendedDataset | None:
        """See `SampleDataset`; None if one corpus has no such form."""
        made = copy.copy(self)
        datasets = [shortened(part.dataset, share) for part in self.parts]
        made.parts = tuple(
            dataclasses.replace(part, dataset=dataset)
            for part, dataset in zip(self.parts, datasets, strict=True)
            if dataset is not None
        )
        return made if len(made.parts) == len(self.parts) else None

    def check_files(self) -> None:
        """Raises OSError if a file of a corpus has become shorter."""
        check_files(*(part.dataset for part in self.parts))

    def epoch_order(self, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """The samples of an epoch in the order of training, and their sizes.

        Returns:
            int64 [N] indices; int32 [N] sizes.
        """
        order = np.empty(self.samples_per_epoch, dtype=np.int64)
        sizes = np.empty(self.samples_per_epoch, dtype=np.int32)
        for number in range(len(self.parts)):
            places = np.flatnonzero(self.corpora == number)
            done = 0
            first, skip = self._place(number, epoch)
            ahead = 0
            while done < len(places):
                samples = self._order_of_pass(number, first + ahead)[skip : skip + len(places) - done]
                here = places[done : done + len(samples)]
                order[here] = len(self) + ahead * self.rooms[-1] + self.rooms[number] + samples
                sizes[here] = np.asarray(self.parts[number].dataset.sizes(first + ahead + 1))[samples]
                done, ahead, skip = done + len(samples), ahead + 1, 0
        return order, sizes

    @property
    def lengths(self) -> list[int]:
        """Samples of successive epochs of training: all have the same number."""
        return [self.samples_per_epoch]

    def table(self) -> list[Share]:
        """What each corpus contributes."""
        return [
            Share(part, float(weight), int(count), float(count / cycle.mean()))
            for part, weight, count, cycle in zip(self.parts, self.shares, self.counts, self.cycles, strict=True)
        ]

    def _find(self, epoch: int, index: int) -> tuple[int, int, int]:
        """(corpus, pass, sample of it) of an index."""
        if index < len(self):
            ahead, starts, place = 0, self.firsts, index
        else:
            ahead, place = divmod(index - len(self), int(self.rooms[-1]))
            starts = self.rooms
        number = int(np.searchsorted(starts, place, side="right")) - 1
        return number, self._place(number, epoch)[0] + ahead, place - int(starts[number])

    def _place(self, number: int, epoch: int) -> tuple[int, int]:
        """(pass, samples of it done) of one corpus at the start of an epoch; passes count from 0."""
        cycle = self.cycles[number]
        cycles, rest = divmod((epoch - 1) * int(self.counts[number]), int(cycle.sum()))
        ends = np.cumsum(cycle)
        shard = int(np.searchsorted(ends, rest, side="right"))
        return cycles * len(cycle) + shard, rest - int(ends[shard] - cycle[shard])

    def _order_of_pass(self, number: int, at: int) -> NDArray[np.int64]:
        cycle = self.cycles[number]
        return SampleRandom(self.seed, at, _PASS_STREAM - number).permutation(int(cycle[at % len(cycle)]))


class ShardedDataset:
    """A corpus in shards, of which each epoch reads one: epoch 1 the first, and so on, cyclically.

    Args:
        shards: the samples of each.
    """

    def __init__(self, shards: Sequence[SampleDataset]) -> None:
        self.shards = tuple(shards)

    def __len__(self) -> int:
        """Samples of the first shard."""
        return len(self.shards[0])

    @property
    def lengths(self) -> list[int]:
        """Samples of successive epochs, repeating."""
        return [len(shard) for shard in self.shards]

    def sizes(self, epoch: int) -> NDArray[np.integer]:
        return self._shard(epoch).sizes(epoch)

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        return self._shard(epoch).sample(epoch, index)

    def samples(self, epoch: int, indices: NDArray[np.int64]) -> Sequence[dict[str, Any]]:
        return samples_of(self._shard(epoch), epoch, indices)

    def shortened(self, share: float) -> ShardedDataset | None:
        """See `SampleDataset`."""
        made = [dataset for shard in self.shards if (dataset := shortened(shard, share)) is not None]
        return ShardedDataset(made) if len(made) == len(self.shards) else None

    def check_files(self) -> None:
        """Raises OSError if a file of a shard has become shorter."""
        check_files(*self.shards)

    def _shard(self, epoch: int) -> SampleDataset:
        return self.shards[(epoch - 1) % len(self.shards)]


def weights_by_size(sizes: Sequence[int], temperature: float) -> NDArray[np.float64]:
    """Weights in proportion to size^(1 / temperature).

    A temperature of 1 keeps the sizes; a higher one favours small corpora, in the limit all are equal.
    """
    logs = np.log(np.asarray(sizes, dtype=np.float64))
    with np.errstate(over="ignore"):
        return np.exp((logs - logs.max()) / temperature)
