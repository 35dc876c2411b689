"""The iterator of an epoch's batches: ordered, shared among ranks, prepared by workers, resumable anywhere."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.utils.data

from ftk.batch import Batch
from ftk.data.batches.collate import PaddedCollater
from ftk.data.batches.order import BatchRequest, Limits, Ordering, Plan, make_plan, order_epoch
from ftk.data.batches.workers import BatchSource, Failure, Refusal, identity, start, worker_death
from ftk.data.sample_dataset import SampleDataset
from ftk.errors import UserError

logger = logging.getLogger(__name__)


class EpochBatchIterator:
    """Gives the batches of one epoch after the other.

    The order of an epoch is drawn by (seed, epoch), see `ftk.data.batches.order`; batches are contiguous in it.
    With several ranks, `world_size` successive batches make a round, one for each rank; where the last round lacks
    batches, its largest are halved, and a rank that still gets none has one sample without loss. So every rank has the
    same number of batches, every sample is given once, and the number of samples consumed is the complete position of
    the run, whatever the number of workers or ranks. A batch's `sample_ids` are the numbers of its samples.

    Args:
        collater: makes a batch of a list of samples.
        batch_size, max_tokens, required_batch_size_multiple: as of `batch_by_size`.
        shuffle: whether the order is random; otherwise it is 0, 1, 2, ...
        bucket_window: number of samples that are sorted by length and cut into batches, which are shuffled; 0: none.
        short_first: number of rounds at the first epoch's start with the shortest samples first, or with packed texts
            that grow to their length; -1: all of them.
        drop_long: leave out samples that are longer than max_tokens; otherwise they are an error.
        num_workers: processes that prepare batches; 0: this one.
        rank, world_size: number of this rank, and of ranks: which share of the batches to give.
        user_dir: the plugin folder, imported in each worker before the dataset arrives there.
        multiprocessing_context: how workers are started: "fork", "spawn", "forkserver"; Python's default if None.

    Raises:
        OSError: the system gives no shared memory for the workers.
        UserError: as of `batch_by_size`, when batches are made.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        collater: Callable[[Sequence[dict[str, Any]]], Batch],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        required_batch_size_multiple: int = 1,
        seed: int = 1,
        shuffle: bool = True,
        bucket_window: int = 0,
        short_first: int = 0,
        drop_long: bool = False,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        user_dir: str | None = None,
        multiprocessing_context: str | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}; it must be in 0 .. {world_size - 1}")
        self.dataset = dataset
        self.limits = Limits(batch_size, max_tokens, required_batch_size_multiple)
        self.seed = seed
        self.shuffle = shuffle
        self.num_workers = num_workers
        self.rank = rank
        self.world_size = world_size
        self.epoch = 1
        self.dropped = 0  # samples of the current epoch that are too long
        self._wanted = Ordering(self.limits, bucket_window, max(-1, short_first * world_size), drop_long)
        self._ordering: Ordering | None = None  # of the current epoch; None: by the present options
        self._samples_consumed = 0
        self._plan: Plan | None = None
        self._loader: torch.utils.data.DataLoader = torch.utils.data.DataLoader(
            BatchSource(user_dir, dataset, collater),
            sampler=_BatchRequests(self),
            batch_size=None,
            collate_fn=identity,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers > 0 else None,
            generator=torch.Generator(),  # else each pass draws from the global one, and dropout after a resume differs
        )

    def pad_batches(self, multiple: int, axes: Mapping[str, str], max_positions: int | None) -> None:
        """Have batches made longer, before the first of them; arguments as of `PaddedCollater`."""
        source: Any = self._loader.dataset
        source.collater = PaddedCollater(source.collater, multiple, axes, max_positions)

    def limit_tokens(self, num_tokens: int | None) -> None:
        """Have tokens beyond a vocabulary of this size refused; None: any. To be called before the first batch."""
        source: Any = self._loader.dataset
        source.num_tokens = num_tokens

    def batches(self) -> Iterator[Batch]:
        """The remaining batches of the epoch; at the end the iterator is at the next epoch's start.

        A caller may stop at any batch; the next call continues from there.

        Raises:
            UserError: from the dataset.
            OSError: the workers cannot be started.
            RuntimeError: a worker process died; the message names it and the samples of its batch.
            Exception: from the dataset or the collater, after the log has named the sample.
        """
        plan = self._current_plan()
        loaded = start(self._loader)
        for round_end in plan.round_ends_after(self._samples_consumed):
            made = self._receive(loaded)
            self._samples_consumed = int(round_end)
            yield made
        self.epoch += 1
        self._samples_consumed = 0
        self._ordering = None

    def close(self) -> None:
        """End the worker processes, if there are any; a further pass starts new ones.

        Python's garbage collector would close their queues before PyTorch tells the workers through these to end;
        PyTorch would then wait five seconds for them to no effect.
        """
        running, self._loader._iterator = self._loader._iterator, None
        if running is not None:
            running._shutdown_workers()  # type: ignore[attr-defined]  # there are workers: none is kept without

    def batches_left(self) -> int:
        """How many batches of this epoch are still to come on each rank."""
        return len(self._current_plan().round_ends_after(self._samples_consumed))

    def batches_of_all_ranks(self) -> int:
        """How many batches of this epoch are still to come on all ranks together, none halved or without loss."""
        return self._current_plan().batches_after(self._samples_consumed)

    def batches_in(self, epoch: int) -> int:
        """How many batches each rank gets in a whole epoch, ordered by the present options."""
        return len(self._new_plan(epoch, self._ordering_of(epoch), 0).round_bounds) - 1

    def state_dict(self) -> dict[str, Any]:
        """The position of the iterator: the batches that were given, without those prepared ahead.

        "ordering" is there in an epoch whose order depends on more than (seed, epoch).
        """
        state: dict[str, Any] = {"epoch": self.epoch, "samples_consumed": self._samples_consumed}
        if self._samples_consumed and self._ordering is not None and not self._ordering.is_plain:
            state["ordering"] = self._ordering.to_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position. The epoch keeps the order it began with, whatever the options are now.

        Raises:
            UserError: there are fewer samples than were consumed: the data is not the same.
        """
        ordering = None
        if "ordering" in state:
            ordering = Ordering.from_dict(state["ordering"])
        elif state["samples_consumed"]:
            ordering = Ordering(self.limits)
        if ordering != self._ordering:
            self._plan = None
        self.epoch, self._samples_consumed, self._ordering = state["epoch"], state["samples_consumed"], ordering
        if self._samples_consumed and self._samples_consumed > (count := len(self._current_plan().indices)):
            raise UserError(
                f"the checkpoint has consumed {self._samples_consumed} samples of epoch {self.epoch}, but the data "
                f"has {count}; has the data changed since the run started?"
            )

    def requests(self) -> Iterator[BatchRequest]:
        """The batches that workers prepare for this rank, from the current place to the epoch's end."""
        return self._current_plan().requests(self._samples_consumed, self.rank)

    def _current_plan(self) -> Plan:
        """The order and the rounds of the epoch; rebuilt where the current place is not at a round's start."""
        plan = self._plan
        if plan is None or plan.epoch != self.epoch or not plan.is_round_bound(self._samples_consumed):
            self._plan = None  # its memory serves the next one
            if self._ordering is None:
                self._ordering = self._ordering_of(self.epoch)
            plan = self._plan = self._new_plan(self.epoch, self._ordering, self._samples_consumed)
            self.dropped = plan.dropped
            if self.dropped and self.rank == 0:
                logger.warning(
                    "epoch %d leaves out %d of %d samples, which are longer than `max_tokens` %s",
                    self.epoch,
                    self.dropped,
                    self.dropped + len(plan.indices),
                    self._ordering.limits.max_tokens,
                )
        return plan

    def _ordering_of(self, epoch: int) -> Ordering:
        return self._wanted if epoch == 1 else replace(self._wanted, short_first=0)

    def _new_plan(self, epoch: int, ordering: Ordering, place: int) -> Plan:
        order = order_epoch(self.dataset, self.seed, epoch, self.shuffle, ordering)
        return make_plan(epoch, order, ordering, self.limits, min(place, len(order.indices)), self.world_size)

    def _receive(self, loaded: Iterator[Any]) -> Batch:
        try:
            made = next(loaded)
        except RuntimeError as error:
            named = worker_death(self._loader, error)
            if named is None:
                raise
            raise named from error
        if isinstance(made, Refusal):
            raise made.error
        if isinstance(made, Failure):
            logger.error("%s", made.what)
            made.error.reraise()
        return made if self.num_workers == 0 else made.map(torch.from_numpy)


class _BatchRequests:
    """The loader's sampler: asks the iterator at the start of each pass.

    It has a weak reference to the iterator: a cycle would keep the worker processes until the next garbage collection.
    """

    def __init__(self, owner: EpochBatchIterator) -> None:
        self._owner = weakref.ref(owner)

    def __iter__(self) -> Iterator[BatchRequest]:
        owner = self._owner()
        assert owner is not None
        return owner.requests()
