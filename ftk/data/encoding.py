"""Encoding blocks of text with worker processes: the same arrays in the same order whatever their number."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data._index import flatten
from ftk.data.records import clean_texts, is_empty, parse_block
from ftk.data.text import Block, Problem
from ftk.errors import UserError

_AHEAD = 4  # blocks per worker that may be finished before the one whose turn it is


@dataclass(frozen=True)
class EncodingSettings:
    """What a worker needs to turn blocks into tokens.

    Attributes:
        tokenizer_folder: written by `Tokenizer.save`; each worker loads it.
        dtype: dtype of the tokens.
        text_key: field of JSON objects that holds the text.
        stop_at_problem: leave out what follows the first document of a block that cannot be read.
        user_dir: plugins to import first.
    """

    tokenizer_folder: Path
    dtype: np.dtype[Any]
    text_key: str = "text"
    stop_at_problem: bool = True
    user_dir: str | None = None


@dataclass
class EncodedBlock:
    """The documents of one block.

    Attributes:
        tokens: all documents back to back, [tokens].
        lengths: tokens of each document, [documents] int32, all above 0.
        num_bytes: bytes of the block.
        num_empty: documents left out because they hold nothing but white space.
        num_without_tokens: documents left out because the tokenizer makes nothing of them.
        problems: documents that could not be read.
        source, disk_bytes: the file and how far it had been read, from the block.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    num_bytes: int = 0
    num_empty: int = 0
    num_without_tokens: int = 0
    problems: list[Problem] = field(default_factory=list)
    source: str = ""
    disk_bytes: int = 0


def encode_block(block: Block, tokenizer: Any, settings: EncodingSettings) -> EncodedBlock:
    """Reads and encodes the documents of one block; command tokens in the text are letters like others.

    Raises:
        UserError: the tokenizer gives an id that the dtype does not hold.
    """
    problems: list[Problem] = []
    found = clean_texts(block, settings.text_key)
    if found is None:
        found = []
        for record in parse_block(block, settings.text_key):
            if not isinstance(record, Problem):
                found.append(record.text)
                continue
            problems.append(record)
            if settings.stop_at_problem:
                break
    texts = [text for text in found if not is_empty(text)]
    try:
        tokens, lengths = flatten(tokenizer.encode_batch(texts), settings.dtype)
    except OverflowError as error:
        raise UserError(f"{block.source}: {error}; the tokenizer's vocab_size is wrong") from error
    kept = lengths[lengths > 0]
    return EncodedBlock(
        tokens=tokens,
        lengths=kept,
        num_bytes=len(block.data),
        num_empty=len(found) - len(texts),
        num_without_tokens=lengths.size - kept.size,
        problems=problems,
        source=block.source,
        disk_bytes=block.disk_bytes,
    )


class EncoderPool:
    """Worker processes that encode blocks.

        with EncoderPool(2, settings) as pool:
            for encoded in pool.encode(blocks): ...

    They end with the block, at once if it ends by an exception, and by themselves if this process dies.

    Args:
        num_workers: processes, at least 1.
        settings: sent to each of them.
    """

    def __init__(self, num_workers: int, settings: EncodingSettings) -> None:
        self._settings = settings
        self._num_workers = num_workers
        self._workers: dict[Connection, multiprocessing.process.BaseProcess] = {}

    def __enter__(self) -> EncoderPool:
        # A fork starts in milliseconds and knows all plugins; elsewhere the workers import what they need.
        context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        mask = _block_signals()
        try:
            for _ in range(self._num_workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, self._settings), daemon=True)
                process.start()
                theirs.close()
                self._workers[ours] = process
        except BaseException:
            self._stop()
            raise
        finally:
            _restore_signals(mask)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def encode(self, blocks: Iterable[Block]) -> Iterator[EncodedBlock]:
        """Encodes blocks; the results come in the order of the blocks.

        Raises:
            UserError: from reading the blocks or from a worker.
            RuntimeError: a worker failed or was killed.
        """
        source = enumerate(blocks)
        pending = next(source, None)
        idle = list(self._workers)
        busy: dict[Connection, int] = {}
        finished: dict[int, EncodedBlock] = {}
        turn = 0
        while pending is not None or busy or finished:
            while idle and pending is not None and pending[0] < turn + _AHEAD * self._num_workers:
                connection = idle.pop()
                busy[connection] = pending[0]
                self._send(connection, pending[1])
                pending = next(source, None)  # read the next while the worker works
            if turn in finished:
                yield finished.pop(turn)
                turn += 1
                continue
            ready = wait([*busy, *(self._workers[connection].sentinel for connection in busy)])
            for connection in [connection for connection in busy if connection in ready]:
                finished[busy.pop(connection)] = self._receive(connection)
                idle.append(connection)
            for connection in [c for c in busy if self._workers[c].sentinel in ready and not c.poll()]:
                raise self._death(connection)

    def _send(self, connection: Connection, block: Block) -> None:
        try:
            connection.send(block)
        except OSError as error:
            raise self._death(connection) from error

    def _receive(self, connection: Connection) -> EncodedBlock:
        try:
            answer = connection.recv()
        except (EOFError, OSError) as error:
            raise self._death(connection) from error
        if isinstance(answer, EncodedBlock):
            return answer
        if isinstance(answer, UserError):
            raise answer
        summary, trace = answer
        raise RuntimeError(f"a worker process failed: {summary}") from RuntimeError(trace)

    def _death(self, connection: Connection) -> RuntimeError:
        process = self._workers[connection]
        process.join(timeout=5)
        hint = "; killed, perhaps for want of memory: try fewer --workers" if process.exitcode == -9 else ""
        return RuntimeError(f"a worker process ended with exit code {process.exitcode}{hint}")

    def _stop(self) -> None:
        for process in self._workers.values():
            process.terminate()
        for connection, process in self._workers.items():
            process.join()
            connection.close()
        self._workers = {}


def _work(connection: Connection, settings: EncodingSettings) -> None:
    """The life of a worker: a block in, an `EncodedBlock` or an error out, until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the parent ends the workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _restore_signals(set())
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the processes share the cores
    tokenizer = None
    while True:
        try:
            block = connection.recv()
        except (EOFError, OSError):
            return
        answer: EncodedBlock | UserError | tuple[str, str]
        try:
            if tokenizer is None:
                tokenizer = _load(settings)
            answer = encode_block(block, tokenizer, settings)
        except UserError as error:
            answer = error
        except Exception as error:
            answer = f"{type(error).__name__}: {error}", traceback.format_exc()
        try:
            connection.send(answer)
        except OSError:  # the parent has gone
            return


def _block_signals() -> set[Any] | None:
    """Holds back Ctrl-C and SIGTERM until a forked worker has put its own handlers in place."""
    if not hasattr(signal, "pthread_sigmask"):
        return None
    return signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})


def _restore_signals(mask: set[Any] | None) -> None:
    if mask is not None and hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _load(settings: EncodingSettings) -> Any:
    from ftk.plugins import import_entry_points, import_user_dir
    from ftk.tokenizers import load_tokenizer

    import_entry_points()
    if settings.user_dir is not None:
        import_user_dir(settings.user_dir)
    return load_tokenizer(settings.tokenizer_folder)
