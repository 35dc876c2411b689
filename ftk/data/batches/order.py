"""The order of an epoch's samples, and its cut into batches and rounds: pure functions of (seed, epoch, options)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ftk.data.batches.batching import batch_by_size
from ftk.data.random import SampleRandom, hash_uniform
from ftk.data.sample_dataset import SampleDataset, shortened

_ORDER_STREAM = -1  # the index of the stream that orders an epoch; samples have 0, 1, ...
_BATCH_STREAM = -(1 << 40)  # of the stream that shuffles the batches of a window


@dataclass(frozen=True)
class Limits:
    """How large batches may be: as of `batch_by_size`."""

    batch_size: int | None = None
    max_tokens: int | None = None
    required_batch_size_multiple: int = 1

    def cut(self, sizes: NDArray[np.integer]) -> NDArray[np.int64]:
        """Bounds of the batches, int64 [batches + 1]."""
        return batch_by_size(sizes, **asdict(self))


@dataclass(frozen=True)
class Ordering:
    """What the order of an epoch depends on besides (seed, epoch).

    It is fixed when the epoch begins and kept in the iterator's state, so that a run that resumes in the middle of
    the epoch with other limits, ranks or accumulation has the same order.

    Attributes:
        limits: of the batches that are shuffled, and of the samples that are dropped.
        window: samples that are sorted by length together; 0: none are.
        short_first: number of batches at the start with the shortest samples first, or, where samples are packed to one
            length, with texts that grow to it; -1: all of the epoch.
        drop_long: whether samples beyond limits.max_tokens are left out.
    """

    limits: Limits = Limits()
    window: int = 0
    short_first: int = 0
    drop_long: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the order depends on (seed, epoch) only."""
        return not (self.window or self.short_first or self.drop_long)

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        return values.pop("limits") | values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Ordering:
        limits = Limits(**{limit.name: values[limit.name] for limit in fields(Limits)})
        return cls(limits, values["window"], values["short_first"], values["drop_long"])


@dataclass(frozen=True)
class EpochOrder:
    """The samples of an epoch in order.

    Attributes:
        indices: int64 [N].
        sizes: integers [N].
        bounds: int64 [batches + 1], places in the order, where it was made of batches.
        dropped: samples that were left out.
        num_growing: samples at the start whose texts grow to their whole length.
    """

    indices: NDArray[np.int64]
    sizes: NDArray[np.integer]
    bounds: NDArray[np.int64] | None = None
    dropped: int = 0
    num_growing: int = 0


def order_epoch(dataset: SampleDataset, seed: int, epoch: int, shuffle: bool, ordering: Ordering) -> EpochOrder:
    """The order of an epoch.

    Shuffled (or as the dataset orders itself), without what is to be dropped; then, of the samples of the first
    `short_first` batches, the shortest first, unless they are packed; then in windows: sorted by length, cut into
    batches, batches shuffled.
    Sorting moves no sample out of its window, so that what holds for the shuffled order (a blend's proportions) holds
    at the windows' ends.
    """
    if shuffle and hasattr(dataset, "epoch_order"):
        indices, sizes = dataset.epoch_order(epoch)
    else:
        sizes = np.asarray(dataset.sizes(epoch))
        if shuffle:
            indices = SampleRandom(seed, epoch, _ORDER_STREAM).permutation(len(sizes))
            sizes = sizes[indices]
        else:
            indices = np.arange(len(sizes), dtype=np.int64)
    dropped, bounds = 0, None
    if ordering.drop_long and ordering.limits.max_tokens is not None:
        kept = sizes <= ordering.limits.max_tokens
        dropped = len(kept) - int(kept.sum())
        if dropped:
            indices, sizes = indices[kept], sizes[kept]
    start = 0
    if ordering.short_first:
        cut = ordering.limits.cut(sizes)
        start = int(cut[-1 if ordering.short_first < 0 else min(ordering.short_first, len(cut) - 1)])
    grows = start > 0 and shortened(dataset, 1.0) is not None
    if ordering.window or (start and not grows):
        places, bounds = _sorted_places(sizes, seed, epoch, ordering, start, sorts_start=not grows)
        indices, sizes = indices[places], sizes[places]
    return EpochOrder(indices, sizes, bounds, dropped, start if grows else 0)


def _sorted_places(
    sizes: NDArray[np.integer], seed: int, epoch: int, ordering: Ordering, start: int, *, sorts_start: bool
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The places of an order in their new order, int64 [N], and the bounds of shuffled batches.

    Args:
        start: samples at the start that belong to no window; `sorts_start`: the shortest of them come first.
    """
    total = len(sizes)
    places = np.arange(total, dtype=np.int64)
    if sorts_start:
        places[:start] = sort_windows(sizes[:start], start)
    if not ordering.window or start == total:
        return places, None
    rest = sort_windows(sizes[start:], ordering.window)
    bounds = ordering.limits.cut(sizes[start:][rest])
    key = SampleRandom(seed, epoch, _BATCH_STREAM).word()
    batches = np.arange(len(bounds) - 1, dtype=np.int64)
    shuffled = np.lexsort((hash_uniform(key, epoch, batches), bounds[:-1] // ordering.window))
    counts = np.diff(bounds)[shuffled]
    ends = np.cumsum(counts)
    # one batch after the other, each the samples bounds[b] .. bounds[b + 1] - 1 of `rest`
    shifts = np.repeat(bounds[:-1][shuffled] - (ends - counts), counts)
    places[start:] = start + rest[np.arange(total - start, dtype=np.int64) + shifts]
    first = ordering.limits.cut(sizes[places[:start]])
    return places, np.concatenate([first, start + ends])


def sort_windows(sizes: NDArray[np.integer], window: int) -> NDArray[np.int64]:
    """The places of `sizes`, sorted by size in each window; in every other one from large to small.

    So the batch across two windows has similar lengths, too. Place, size and window make one number of 64 bits: it is
    much faster to sort than three, and, since no two are equal, comes out the same on every processor.

    Args:
        sizes: [N], none negative.
        window: how many successive ones are sorted together, at least 1 where there are any.

    Returns:
        int64 [N].
    """
    if not len(sizes):
        return np.empty(0, dtype=np.int64)
    places = np.arange(len(sizes), dtype=np.int64)
    windows = places // window
    span = int(sizes.max()) + 1
    keys = sizes.astype(np.int64)
    np.subtract(span - 1, keys, out=keys, where=(windows & 1).astype(np.bool_))
    keys += windows * span
    keys *= window
    keys += places - windows * window
    keys.sort()
    return windows * window + keys % window


@dataclass(frozen=True)
class BatchRequest:
    """One batch to prepare; a filler has no loss."""

    epoch: int
    indices: NDArray[np.int64]  # [B]
    is_filler: bool = False
    length_share: float = 1.0  # of packed texts


@dataclass(eq=False)
class Plan:
    """The rounds of an epoch from some place on.

    Attributes:
        indices: int64 [N], the samples of the epoch in order.
        bounds: int64 [batches + 1], places in the order.
        world_size: batches in a round.
        dropped: samples of the epoch that were left out.
        num_growing: samples at the epoch's start whose texts grow to their whole length.
        round_bounds: int64 [rounds + 1], where rounds begin and end in the order.
    """

    epoch: int
    indices: NDArray[np.int64]
    bounds: NDArray[np.int64]
    world_size: int
    dropped: int = 0
    num_growing: int = 0

    def __post_init__(self) -> None:
        rounds = -(-(len(self.bounds) - 1) // self.world_size)
        ends = np.minimum(np.arange(1, rounds + 1) * self.world_size, len(self.bounds) - 1)
        self.round_bounds = np.concatenate([self.bounds[:1], self.bounds[ends]])

    def is_round_bound(self, place: int) -> bool:
        """Whether a round starts or ends at a place of the order."""
        found = int(np.searchsorted(self.round_bounds, place))
        return found < len(self.round_bounds) and bool(self.round_bounds[found] == place)

    def round_ends_after(self, place: int) -> NDArray[np.int64]:
        """Where the rounds from a place on end."""
        return self.round_bounds[np.searchsorted(self.round_bounds, place) + 1 :]

    def batches_after(self, place: int) -> int:
        """How many batches there are from a place on, as they were cut."""
        return len(self.bounds) - 1 - int(np.searchsorted(self.bounds, place))

    def requests(self, place: int, rank: int) -> Iterator[BatchRequest]:
        """The batches of one rank from a place on."""
        for number in range(int(np.searchsorted(self.round_bounds, place)), len(self.round_bounds) - 1):
            bounds = self.bounds[number * self.world_size : (number + 1) * self.world_size + 1].tolist()
            share = length_share(bounds[0], self.num_growing)
            while len(bounds) <= self.world_size and _halve_largest(bounds):
                pass
            is_filler = rank + 1 >= len(bounds)
            start, stop = (bounds[0], bounds[0] + 1) if is_filler else (bounds[rank], bounds[rank + 1])
            yield BatchRequest(self.epoch, self.indices[start:stop], is_filler, share)


def length_share(place: int, num_growing: int) -> float:
    """How much of their length packed texts have, from an eighth on in even steps (Li et al. 2022, arXiv 2108.06084).

    Args:
        place: of the first sample of a round in its epoch.
        num_growing: samples before the first that has all of it.
    """
    return 1.0 if place >= num_growing else 0.125 + 0.875 * place / num_growing


def make_plan(epoch: int, order: EpochOrder, ordering: Ordering, limits: Limits, place: int, world_size: int) -> Plan:
    """The rounds of an epoch from a place on, in batches within `limits`.

    The batches that were shuffled stay as they are, unless the limits have changed since the epoch began.
    """
    if order.bounds is not None and limits == ordering.limits:
        found = int(np.searchsorted(order.bounds, place))
        if order.bounds[found] == place:
            return Plan(epoch, order.indices, order.bounds[found:], world_size, order.dropped, order.num_growing)
    bounds = place + limits.cut(order.sizes[place:])
    return Plan(epoch, order.indices, bounds, world_size, order.dropped, order.num_growing)


def _halve_largest(bounds: list[int]) -> bool:
    """Halves the batch with the most samples, in place; False where all have one."""
    sizes = [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
    largest = sizes.index(max(sizes))
    if sizes[largest] < 2:
        return False
    bounds.insert(largest + 1, bounds[largest] + sizes[largest] // 2)
    return True
