"""Encoding blocks of text with worker processes: the same arrays in the same order whatever their number."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ftk.data._index import flatten
from ftk.data.child_process import death, receive, send_result, start_child, stop_child
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
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> EncoderPool:
        try:
            for _ in range(self._num_workers):
                connection, process = start_child(_work, self._settings)
                self._workers[connection] = process
        except BaseException:
            self._stop()
            raise
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
                finished[busy.pop(connection)] = receive(connection, self._workers[connection])
                idle.append(connection)
            for connection in [c for c in busy if self._workers[c].sentinel in ready and not c.poll()]:
                raise death(self._workers[connection])

    def _send(self, connection: Connection, block: Block) -> None:
        try:
            connection.send(block)
        except OSError as error:
            raise death(self._workers[connection]) from error

    def _stop(self) -> None:
        for process in self._workers.values():
            process.terminate()  # all at once; then each is waited for
        for connection, process in self._workers.items():
            stop_child(connection, process)
        self._workers = {}


def _work(connection: Connection, settings: EncodingSettings) -> None:
    """The life of a worker: a block in, an `EncodedBlock` or an error out, until nobody asks any more."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the processes share the cores
    tokenizer: Any = None

    def encode(block: Block) -> EncodedBlock:
        nonlocal tokenizer
        if tokenizer is None:
            tokenizer = _load(settings)
        return encode_block(block, tokenizer, settings)

    while True:
        try:
            block = connection.recv()
        except (EOFError, OSError):
            return
        if not send_result(connection, encode, block):
            return


def _load(settings: EncodingSettings) -> Any:
    from ftk.plugins import import_entry_points, import_user_dir
    from ftk.tokenizers import load_tokenizer

    import_entry_points()
    if settings.user_dir is not None:
        import_user_dir(settings.user_dir)
    return load_tokenizer(settings.tokenizer_folder)
