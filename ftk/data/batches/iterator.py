"""The iterator of an epoch's batches: ordered, shared among ranks, prepared by workers, resumable anywhere."""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import multiprocessing
import os
import re
import signal
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ftk.batch import Batch
from ftk.data.batches.collate import PaddedCollater
from ftk.data.batches.order import Limits, Ordering, Plan, Request, make_plan, order_epoch
from ftk.data.indexed.file_map import check_files, guard_again
from ftk.data.sample_dataset import SampleDataset, samples_of, shortened
from ftk.data.text.child_process import end_with_parent
from ftk.errors import UserError

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "shared memory (a folder /dev/shm that can be written to and has room)"


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
            _BatchSource(dataset, collater, user_dir),
            sampler=_Requests(self),
            batch_size=None,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            multiprocessing_context=multiprocessing_context if num_workers > 0 else None,
            generator=torch.Generator(),  # else each pass draws from the global one, and dropout after a resume differs
        )

    def pad_batches(self, multiple: int, axes: Mapping[str, str], max_positions: int | None) -> None:
        """Have batches made longer, before the first of them; arguments as of `PaddedCollater`."""
        source: Any = self._loader.dataset
        source.collater = PaddedCollater(source.collater, multiple, axes, max_positions)

    @property
    def samples_consumed(self) -> int:
        """Samples of this epoch that were given, on all ranks together."""
        return self._samples_consumed

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
        loaded = _start(self._loader)
        for stop in plan.stops_after(self._samples_consumed):
            made = self._receive(loaded)
            self._samples_consumed = int(stop)
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
        return len(self._current_plan().stops_after(self._samples_consumed))

    def batches_of_all_ranks(self) -> int:
        """How many batches of this epoch are still to come on all ranks together, none halved or without loss."""
        return self._current_plan().batches_after(self._samples_consumed)

    def batches_in(self, epoch: int) -> int:
        """How many batches each rank gets in a whole epoch, ordered by the present options."""
        return len(self._new_plan(epoch, self._ordering_of(epoch), 0).places) - 1

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
                f"has {count}; is it other data than the run began with?"
            )

    def requests(self) -> Iterator[Request]:
        """The batches that workers prepare for this rank, from the current place to the epoch's end."""
        return self._current_plan().requests(self._samples_consumed, self.rank)

    def _current_plan(self) -> Plan:
        """The order and the rounds of the epoch; rebuilt where the current place is not at a round's start."""
        plan = self._plan
        if plan is None or plan.epoch != self.epoch or not plan.has_place(self._samples_consumed):
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
            named = self._worker_death(error)
            if named is None:
                raise
            raise named from error
        if isinstance(made, _Refusal):
            raise made.error
        if isinstance(made, _Failed):
            logger.error("%s", made.what)
            made.error.reraise()
        return made if self.num_workers == 0 else made.map(torch.from_numpy)

    def _worker_death(self, error: RuntimeError) -> RuntimeError | None:
        """The loader's error for a worker that died, with the worker's number; None for any other error."""
        found = re.search(r"DataLoader worker \(pid\(?s?\)? ?(\d+)[^)]*\)(.*)", str(error))
        if found is None:
            return None
        running, self._loader._iterator = self._loader._iterator, None
        assert isinstance(running, _MultiProcessingDataLoaderIter), "its worker died"
        _abandon_queues(running)
        workers = running._workers
        which, how = "", found.group(2).strip(" .")
        for number, worker in enumerate(workers, start=1):
            if worker.pid == int(found.group(1)):
                which = f"{number} of {len(workers)} "
                if worker.exitcode is not None and worker.exitcode < 0:
                    how = f"killed by {signal.Signals(-worker.exitcode).name}"
        _kill_workers(running)
        hint = "; if memory ran out, fewer workers (`num_workers`) or smaller batches help" if "KILL" in how else ""
        return RuntimeError(f"data worker {which}(pid {found.group(1)}) died: {how}{hint}")


class _Requests:
    """The loader's sampler: asks the iterator at the start of each pass.

    It has a weak reference to the iterator: a cycle would keep the worker processes until the next garbage collection.
    """

    def __init__(self, owner: EpochBatchIterator) -> None:
        self._owner = weakref.ref(owner)

    def __iter__(self) -> Iterator[Request]:
        owner = self._owner()
        assert owner is not None
        return owner.requests()

    def __len__(self) -> int:
        owner = self._owner()
        assert owner is not None
        return owner.batches_left()


@dataclass(frozen=True)
class _Refusal:
    """An error of the user or the system in a worker, sent to the main process without a traceback."""

    error: UserError | OSError


@dataclass(frozen=True)
class _Failed:
    """Any other error in a worker, and which sample it was."""

    what: str
    error: ExceptionWrapper


class _UserDir:
    """Imports the user's plugin where it is unpickled: in a spawned worker, before the dataset that follows it."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _import_in_worker, (self.path,)


def _import_in_worker(path: str | None) -> _UserDir:
    if path is not None:
        from ftk.plugins import import_user_dir

        import_user_dir(path)
    return _UserDir(path)


class _BatchSource(torch.utils.data.Dataset):
    """The loader's dataset: makes a whole batch of a request."""

    def __init__(
        self,
        dataset: SampleDataset,
        collater: Callable[[Sequence[dict[str, Any]]], Batch],
        user_dir: str | None,
    ) -> None:
        self.dataset = dataset
        self.collater = collater
        self.user_dir = _UserDir(user_dir)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _restore, (self.user_dir, self.dataset, self.collater)

    def __getitem__(self, request: Request) -> Batch | _Refusal | _Failed:
        worker = torch.utils.data.get_worker_info()
        dataset = self.dataset if request.share == 1.0 else shortened(self.dataset, request.share)
        assert dataset is not None, "only of a dataset with a shorter form a share is asked"
        try:
            batch = self.collater(samples_of(dataset, request.epoch, request.indices))
            check_files(self.dataset)
        except (UserError, OSError) as error:
            return _Refusal(error)
        except Exception:
            what = _failing_sample(dataset, request)
            if worker is not None:
                return _Failed(what, ExceptionWrapper(where="in a data worker"))
            logger.error("%s", what)
            raise
        if request.is_filler:
            batch = batch.without_loss()
        batch.sample_ids = np.array(request.indices, dtype=np.int64)
        # Arrays go through the pipe as bytes. Tensors would go through shared memory, which containers keep short, and
        # through a server thread in the worker, which complains when the run stops.
        return batch if worker is None else batch.map(torch.Tensor.numpy)


def _failing_sample(dataset: SampleDataset, request: Request) -> str:
    """Which sample of a batch fails, found by making one after the other."""
    for index in request.indices:
        try:
            dataset.sample(request.epoch, int(index))
        except Exception:
            return f"sample {index} of epoch {request.epoch} cannot be made"
    return f"no batch can be made of samples {', '.join(map(str, request.indices))} of epoch {request.epoch}"


def _restore(user_dir: _UserDir, dataset: SampleDataset, collater: Callable[..., Batch]) -> _BatchSource:
    return _BatchSource(dataset, collater, user_dir.path)


def _start(loader: torch.utils.data.DataLoader) -> Iterator[Any]:
    """Starts a pass. The death of a worker is raised where its batch is waited for, and nowhere else.

    PyTorch would raise it from a handler of SIGCHLD at any place of the main thread, in the middle of an update, too.
    """
    before = signal.getsignal(signal.SIGCHLD) if hasattr(signal, "SIGCHLD") else None
    in_main_thread = threading.current_thread() is threading.main_thread()
    # The kernel ends workers with the thread that started them: only with the main thread, and only direct children.
    context = loader.multiprocessing_context or multiprocessing
    direct = in_main_thread and context.get_start_method() != "forkserver"
    loader.worker_init_fn = functools.partial(_prepare_worker, os.getpid() if direct else None)
    with _starting_workers():
        loaded = iter(loader)
    if before is not None and in_main_thread:
        signal.signal(signal.SIGCHLD, before)
    return loaded


@contextlib.contextmanager
def _starting_workers() -> Iterator[None]:
    """Errors of the system inside name what data workers need."""
    try:
        yield
    except OSError as error:
        _end_half_made(error)
        limits = {errno.EMFILE: "ulimit -n", errno.ENFILE: "fs.file-max", errno.EAGAIN: "ulimit -u"}
        need = f"more files or processes ({limits[error.errno]})" if error.errno in limits else _SHARED_MEMORY
        what = f"the data workers cannot start ({error.strerror}): they need {need}; `num_workers` 0 does without them"
        raise OSError(error.errno, what) from error


def _end_half_made(error: OSError) -> None:
    """End the workers of a loader whose making failed; PyTorch, unaware of how far it came, would print a traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        made = frame.f_locals.get("self")
        if isinstance(made, _MultiProcessingDataLoaderIter):
            _kill_workers(made)


def _kill_workers(running: Any) -> None:
    """End the workers of a loader that failed, at once and without its locks, which one of them may have left taken."""
    running._shutdown = True
    if getattr(running, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(running))
        running._worker_pids_set = False
    for worker in getattr(running, "_workers", []):
        worker.kill()
        worker.join()


def _abandon_queues(running: Any) -> None:
    """Keeps the queues of a loader that failed from being closed in order.

    PyTorch may raise the death of a worker from a signal handler that runs inside `Queue.put`, after the queue's lock
    was taken and before its release is certain; closing the queue, at the latest when Python exits, would then wait for
    that lock for ever.
    """
    for queue in getattr(running, "_index_queues", []):
        queue.cancel_join_thread()
        if (closing := getattr(queue, "_close", None)) is not None:
            closing.cancel()


def _unchanged(batch: Any) -> Any:
    return batch


def _prepare_worker(parent: int | None, worker: int) -> None:
    """Prepares a worker: a signal to the whole process group (Ctrl-C, SIGTERM) is left to the main process.

    A worker that died of one would end the main process while it saves a checkpoint.

    Args:
        parent: the main process, with which this one ends; None: torch's watchdog ends it, after seconds.
    """
    if parent is not None:
        end_with_parent(parent)
    guard_again()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
