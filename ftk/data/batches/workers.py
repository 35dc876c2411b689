"""The processes that prepare batches: what they make, how they start, what ends them."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.utils.data
from torch._utils import ExceptionWrapper
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from ftk.batch import Batch
from ftk.child_process import end_with_parent
from ftk.data.batches.order import BatchRequest
from ftk.data.indexed._file_maps import install
from ftk.data.indexed.file_map import check_files
from ftk.data.sample_dataset import SampleDataset, samples_of, shortened
from ftk.errors import UserError
from ftk.registry import is_plugin, named

logger = logging.getLogger(__name__)

_SHARED_MEMORY = "shared memory (a folder /dev/shm that can be written to and has room)"


@dataclass(frozen=True)
class Refusal:
    """An error of the user or the system in a worker, sent to the main process without a traceback."""

    error: UserError | OSError


@dataclass(frozen=True)
class Failure:
    """Any other error in a worker, and which sample it was."""

    what: str
    error: ExceptionWrapper


class _UserDir:
    """The path of the user's plugin, which is imported where this is unpickled: in a spawned worker, as the path."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _imported, (self.path,)


def _imported(path: str | None) -> str | None:
    if path is not None:
        from ftk.plugins import import_user_dir

        import_user_dir(path)
    return path


class BatchSource(torch.utils.data.Dataset):
    """The loader's dataset: makes a whole batch of a request.

    Args:
        num_tokens: size of the vocabulary that the model reads; a token beyond it is refused with its sample, which
            the error of the embedding does not name (on a GPU, an assertion that ends the process). None: any.
    """

    def __init__(
        self,
        user_dir: str | None,
        dataset: SampleDataset,
        collater: Callable[[Sequence[dict[str, Any]]], Batch],
        num_tokens: int | None = None,
    ) -> None:
        self.user_dir, self.dataset, self.collater, self.num_tokens = user_dir, dataset, collater, num_tokens

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return BatchSource, (
            _UserDir(self.user_dir), self.dataset, self.collater, self.num_tokens,
        )  # fmt: skip  # the plugin before what needs it

    def __getitem__(self, request: BatchRequest) -> Batch | Refusal | Failure:
        worker = torch.utils.data.get_worker_info()
        dataset = self.dataset if request.length_share == 1.0 else shortened(self.dataset, request.length_share)
        assert dataset is not None, "a dataset without a shorter form is always asked for whole texts"
        try:
            batch = self.collater(samples_of(dataset, request.epoch, request.indices))
            check_files(self.dataset)
            if self.num_tokens is not None:
                self._refuse_unknown_tokens(batch, dataset, request, self.num_tokens)
        except (UserError, OSError) as error:
            return Refusal(error)
        except Exception:
            what = _failing_sample(dataset, request)
            if worker is not None:
                return Failure(what, ExceptionWrapper(where="in a data worker"))
            logger.error("%s", what)
            raise
        if request.is_filler:
            batch = batch.without_loss()
        batch.sample_ids = np.array(request.indices, dtype=np.int64)
        # Arrays go through the pipe as bytes. Tensors would go through shared memory, which containers keep short, and
        # through a server thread in the worker, which complains when the run stops.
        return batch if worker is None else batch.map(torch.Tensor.numpy)

    def _refuse_unknown_tokens(
        self, batch: Batch, dataset: SampleDataset, request: BatchRequest, num_tokens: int
    ) -> None:
        unknown = _unknown_token(batch, num_tokens)
        if unknown is None:
            return
        samples = ((index, dataset.sample(request.epoch, int(index))) for index in request.indices)
        found = (index for index, sample in samples if _unknown_token(self.collater([sample]), num_tokens) is not None)
        index = next(found, " or ".join(map(str, request.indices)))
        whose = f" of {named(dataset)}" if is_plugin(dataset) else ""
        raise UserError(
            f"sample {index} of epoch {request.epoch}{whose} has the token {unknown}, but the model's vocabulary is "
            f"0 to {num_tokens - 1}; samples may hold the tokenizer's tokens alone"
        )


def _unknown_token(batch: Batch, num_tokens: int) -> int | None:
    """The first token id found outside 0 to num_tokens - 1; None if all are inside."""
    for tokens in batch.read_tokens:
        if tokens.dtype in (torch.int32, torch.int64) and tokens.numel():  # what an embedding reads
            smallest, largest = map(int, tokens.aminmax())
            if smallest < 0 or largest >= num_tokens:
                return smallest if smallest < 0 else largest
    return None


def _failing_sample(dataset: SampleDataset, request: BatchRequest) -> str:
    """Which sample of a batch fails, found by making one after the other."""
    for index in request.indices:
        try:
            dataset.sample(request.epoch, int(index))
        except Exception:
            return f"sample {index} of epoch {request.epoch} cannot be made"
    return f"no batch can be made of samples {', '.join(map(str, request.indices))} of epoch {request.epoch}"


def start(loader: torch.utils.data.DataLoader) -> Iterator[Any]:
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
        _kill_started_workers(error)
        limits = {errno.EMFILE: "ulimit -n", errno.ENFILE: "fs.file-max", errno.EAGAIN: "ulimit -u"}
        need = f"more files or processes ({limits[error.errno]})" if error.errno in limits else _SHARED_MEMORY
        what = f"the data workers cannot start ({error.strerror}): they need {need}; `num_workers` 0 does without them"
        raise OSError(error.errno, what) from error


def _kill_started_workers(error: OSError) -> None:
    """End the workers of a loader whose making failed; PyTorch, unaware of how far it came, would print a traceback."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        made = frame.f_locals.get("self")
        if isinstance(made, _MultiProcessingDataLoaderIter):
            _kill_workers(made)


def worker_death(loader: torch.utils.data.DataLoader, error: RuntimeError) -> RuntimeError | None:
    """The loader's error for a worker that died, with the worker's number; None for any other error."""
    found = re.search(r"DataLoader worker \(pid\(?s?\)? ?(\d+)[^)]*\)(.*)", str(error))
    if found is None:
        return None
    running, loader._iterator = loader._iterator, None
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


def identity(batch: Any) -> Any:
    return batch


def _prepare_worker(parent: int | None, worker: int) -> None:
    """Prepares a worker: a signal to the whole process group (Ctrl-C, SIGTERM) is left to the main process.

    A worker that died of one would end the main process while it saves a checkpoint.

    Args:
        parent: the main process, with which this one ends; None: torch's watchdog ends it, after seconds.
    """
    if parent is not None:
        end_with_parent(parent)
    install()  # once more: PyTorch's data workers start with signal handlers of their own
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
