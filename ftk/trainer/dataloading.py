"""The iterators of a run: over the training split and over each validation split."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ftk.batch import Batch
from ftk.config.common import CommonConfig
from ftk.data.batches.dataloader_config import DataloaderConfig
from ftk.data.batches.iterator import EpochBatchIterator
from ftk.data.corpora.blending import BlendedDataset
from ftk.data.sample_dataset import SampleDataset, lengths_of, samples_of, shortened
from ftk.tasks.base import Task
from ftk.tasks.contract import load_samples
from ftk.trainer.config import TrainingConfig

logger = logging.getLogger(__name__)

DEFAULT_BATCH_SIZE = 8


def train_iterator(
    config: DataloaderConfig, common: CommonConfig, task: Task, update_freq: int = 1, *, rank: int = 0, ranks: int = 1
) -> EpochBatchIterator:
    """Shuffled batches of the training split, epoch after epoch; those of one of `ranks` data-parallel ranks."""
    dataset = load_samples(task, config.train_subset, train=True)
    grows = config.curriculum_updates and shortened(dataset, 1.0) is not None
    if grows:
        logger.info("`curriculum_updates` %d: packed texts grow to their length", config.curriculum_updates)
    by_length = ["`bucket_window`"] if config.bucket_window else []
    if config.curriculum_updates and not grows:
        by_length.append("`curriculum_updates`")
    if by_length:
        sizes = dataset.sizes(1)
        if len(sizes) and sizes.min() == sizes.max():
            logger.warning(
                "all samples count as %d tokens: no effect of %s (packed samples all fill `seq_length`)",
                sizes[0],
                ", ".join(by_length),
            )
    return batch_iterator(config, common, task, dataset, shuffle=True, update_freq=update_freq, rank=rank, ranks=ranks)


def valid_iterators(
    config: DataloaderConfig, common: CommonConfig, task: Task, *, rank: int = 0, ranks: int = 1
) -> dict[str, EpochBatchIterator]:
    """Name of each validation split -> its batches, in order."""
    datasets: dict[str, SampleDataset] = {split: load_samples(task, split) for split in valid_names(config)}
    if config.max_valid_samples is not None:
        datasets = {split: SomeSamples(dataset, config.max_valid_samples) for split, dataset in datasets.items()}
    return {
        split: batch_iterator(config, common, task, dataset, shuffle=False, rank=rank, ranks=ranks)
        for split, dataset in datasets.items()
    }


def split_names(config: DataloaderConfig) -> list[str]:
    """Names of the training and validation splits."""
    return list(dict.fromkeys([config.train_subset, *valid_names(config)]))


def valid_names(config: DataloaderConfig) -> list[str]:
    """Names of the validation splits."""
    return [name.strip() for name in (config.valid_subset or "").split(",") if name.strip()]


def batch_iterator(
    config: DataloaderConfig,
    common: CommonConfig,
    task: Task,
    dataset: SampleDataset,
    *,
    shuffle: bool,
    update_freq: int = 1,
    rank: int = 0,
    ranks: int = 1,
) -> EpochBatchIterator:
    """Batches of a dataset of the task; `bucket_window` and `curriculum_updates` apply only if they are shuffled."""
    batch_size = config.batch_size
    if batch_size is None and config.max_tokens is None:
        batch_size = DEFAULT_BATCH_SIZE
    return EpochBatchIterator(
        dataset,
        task.collater(),
        batch_size=batch_size,
        max_tokens=config.max_tokens,
        required_batch_size_multiple=config.required_batch_size_multiple,
        seed=common.seed,
        shuffle=shuffle,
        bucket_window=config.bucket_window if shuffle else 0,
        short_first=config.curriculum_updates * update_freq if shuffle else 0,
        drop_long=config.long_samples == "drop",
        num_workers=config.num_workers,
        rank=rank,
        world_size=ranks,
        user_dir=common.user_dir,
    )


def updates_per_epoch(iterator: EpochBatchIterator, update_freq: int) -> list[int]:
    """Updates in successive epochs, as a cycle (shards differ); no update spans two epochs."""
    shards = len(lengths_of(iterator.dataset))
    batches = [iterator.batches_left()] if shards == 1 else [iterator.batches_in(1 + shard) for shard in range(shards)]
    return [-(-count // update_freq) for count in batches]


def total_updates(training: TrainingConfig, per_epoch: Sequence[int]) -> int | None:
    """Length of the run by `max_update` and `max_epoch`, None without either."""
    limits = []
    if training.max_update is not None:
        limits.append(training.max_update)
    if training.max_epoch is not None:
        cycles, rest = divmod(training.max_epoch, len(per_epoch))
        limits.append(cycles * sum(per_epoch) + sum(per_epoch[:rest]))
    return min(limits, default=None)


def in_groups(iterator: EpochBatchIterator, size: int) -> Iterator[list[Batch]]:
    """The rest of the epoch as lists of `size` batches, the last one may be shorter; fetched one list at a time.

    The iterator is in the next epoch once a list after the last one was asked for, and not before.
    """
    batches = iterator.batches()
    while group := list(itertools.islice(batches, min(size, iterator.batches_left()))):
        yield group
    next(batches, None)


class SomeSamples:
    """The first `num_samples` samples of a dataset; of a blend the first ones of each corpus, in proportion.

    Each corpus gives at least one sample if `num_samples` allows.

    Attributes:
        indices: int64 [len], of the samples in the dataset.
    """

    def __init__(self, dataset: SampleDataset, num_samples: int) -> None:
        self.dataset = dataset
        firsts = dataset.firsts if isinstance(dataset, BlendedDataset) else np.array([0, len(dataset)])  # [K + 1]
        num_samples = min(num_samples, int(firsts[-1]))
        counts = np.diff(firsts * num_samples // max(1, firsts[-1]))  # [K]
        if num_samples >= len(counts):
            for number in np.flatnonzero((counts == 0) & (np.diff(firsts) > 0)):
                counts[counts.argmax()] -= 1
                counts[number] = 1
        starts = firsts[:-1]  # [K]
        self.indices = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, counts, strict=True)])

    def __len__(self) -> int:
        return len(self.indices)

    def sample(self, epoch: int, index: int) -> dict[str, Any]:
        return self.dataset.sample(epoch, int(self.indices[index]))

    def samples(self, epoch: int, indices: np.ndarray) -> Sequence[dict[str, Any]]:
        return samples_of(self.dataset, epoch, self.indices[indices])

    def sizes(self, epoch: int) -> np.ndarray:
        return self.dataset.sizes(epoch)[self.indices]  # int32 [len]
