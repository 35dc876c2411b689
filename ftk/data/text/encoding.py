"""Encoding blocks of text with worker processes: the same arrays in the same order whatever their number."""

from __future__ import annotations

import gc
import hashlib
import os
import unicodedata
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ftk.child_process import can_fork, death, receive, send_result, start_child, stop_child
from ftk.data.indexed._index import flatten
from ftk.data.text.blocks import Block, Part, Problem
from ftk.data.text.files import read_part
from ftk.data.text.pairs import SEPARATOR, is_pair
from ftk.data.text.preprocess_config import DocumentConfig, TextConfig
from ftk.data.text.records import clean_texts, parse_block
from ftk.errors import UserError
from ftk.freed_memory import keep_freed_blocks

_AHEAD = 8  # tasks per worker that may be finished before the one whose turn it is

_Arrays: TypeAlias = tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.uint64]]


@dataclass(frozen=True)
class EncodingSettings:
    """What a worker needs to turn text into tokens.

    Attributes:
        tokenizer_folder: written by `Tokenizer.save`; a worker that is not forked loads it.
        dtype: dtype of the tokens.
        text: how documents are read; with `on_error` raise, a block ends before the first that cannot be.
        documents: which documents are left out, and what is done to the others.
        user_dir: plugins to import first.
        end_token: appended to each document and not counted by the limits; None: nothing.
        pairs: documents are pairs of texts (`ftk.data.text.pairs`); `source_end` closes the first, `end_token` the
            other, and both are counted.
        source_end: see `pairs`.
        with_hashes: compute the hash of each document.
        unknown: count this id; None: nothing is counted.
    """

    tokenizer_folder: Path
    dtype: np.dtype[Any]
    text: TextConfig = field(default_factory=TextConfig)
    documents: DocumentConfig = field(default_factory=DocumentConfig)
    user_dir: str | None = None
    end_token: int | None = None
    pairs: bool = False
    source_end: int | None = None
    with_hashes: bool = False
    unknown: int | None = None


@dataclass
class EncodedBlock:
    """The documents of one block, or of several small files.

    Attributes:
        tokens: all documents back to back, [tokens].
        lengths: tokens of each document, [documents] int32, all above 0.
        hashes: of the text of each document, [documents] uint64, or [0] where they were not asked for.
        num_bytes, num_lines: bytes that were read, and line ends up to here: of a part from its start, of a block from
            that of the file, or of the range that is read of it.
        skipped: reason -> documents left out, those of `problems` excepted.
        problems: documents that could not be read.
        source, disk_bytes: the file and the bytes of it read so far; of several files the last.
        starts_file: whether it starts a file: its lines are counted from the start of the file.
        num_unknown: unknown tokens among `tokens`.
    """

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int32]
    hashes: npt.NDArray[np.uint64]
    num_bytes: int = 0
    num_lines: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    source: str = ""
    disk_bytes: int = 0
    starts_file: bool = True
    num_unknown: int = 0


def encode_blocks(items: Sequence[Part | Block], tokenizer: Any, settings: EncodingSettings) -> EncodedBlock:
    """Reads and encodes documents; the spelling of a command token in a text is text like any other.

    Args:
        items: a part or a block, or parts that are whole files; at least one.

    Raises:
        UserError: the tokenizer gives an id that the dtype does not hold.
    """
    found: list[str] = []
    problems: list[Problem] = []
    num_bytes = num_lines = 0
    for item in items:
        block = read_part(item, settings.text.max_document_bytes) if isinstance(item, Part) else item
        num_bytes += len(block.data) + block.passed
        num_lines = block.line - 1 + block.num_lines
        found += _texts(block, settings, problems)
        if problems and settings.text.on_error == "raise":
            break
    skipped: Counter[str] = Counter()
    step = max(1, len(found) * tokenizer.batch_bytes // max(num_bytes, 1))  # about `batch_bytes` of text
    batches = [
        _encode(found[first : first + step], block.source, tokenizer, settings, skipped)
        for first in range(0, max(len(found), 1), step)
    ]
    tokens, lengths, hashes = (
        arrays[0] if len(batches) == 1 else np.concatenate(arrays) for arrays in zip(*batches, strict=True)
    )
    return EncodedBlock(
        tokens=tokens,
        lengths=lengths,
        hashes=hashes,
        num_bytes=num_bytes,
        num_lines=num_lines,
        skipped=skipped,
        problems=problems,
        source=block.source,
        disk_bytes=block.disk_bytes,
        starts_file=not isinstance(item, Part) or item.is_first,
        num_unknown=0 if settings.unknown is None else int(np.count_nonzero(tokens == settings.unknown)),
    )


def _encode(
    found: list[str], source: str, tokenizer: Any, settings: EncodingSettings, skipped: Counter[str]
) -> _Arrays:
    """Tokens, lengths and hashes of the texts that are not left out; the others are counted in `skipped`."""
    form = settings.documents.normalize
    if form != "none":
        found = [normalized(text, form) for text in found]
    if settings.pairs:
        texts = [text for text in found if is_pair(text)]
        parts = [part for text in texts for part in text.split(SEPARATOR)]
    else:
        texts = parts = [text for text in found if text and not text.isspace()]
    try:
        rows = _pair_rows(parts, tokenizer) if settings.pairs else tokenizer.encode_rows(parts)
        tokens, lengths = flatten(rows, settings.dtype)
    except OverflowError as error:
        raise UserError(f"{source}: {error}; the tokenizer's vocab_size is wrong") from error
    hashes = hash_texts(texts) if settings.with_hashes else np.empty(0, dtype=np.uint64)
    skipped["empty"] += len(found) - len(texts)
    if settings.source_end is not None and settings.end_token is not None:
        tokens, lengths = _joined(tokens, lengths, (settings.source_end, settings.end_token))
    tokens, lengths, hashes = _within_limits((tokens, lengths, hashes), settings.documents, skipped)
    if settings.end_token is not None and lengths.size and not settings.pairs:
        tokens = np.insert(tokens, np.cumsum(lengths), settings.end_token)
        lengths = lengths + 1
    return tokens, lengths, hashes


def _pair_rows(parts: list[str], tokenizer: Any) -> Any:
    """The ids of sources and targets in turn."""
    if tokenizer.source is None:
        return tokenizer.encode_rows(parts)
    sides = tokenizer.source.encode_batch(parts[::2]), tokenizer.encode_batch(parts[1::2])
    return [row for pair in zip(*sides, strict=True) for row in pair]


def _joined(
    tokens: npt.NDArray[Any], lengths: npt.NDArray[np.int32], ends: tuple[int, int]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
    """Every two texts as one, closed by the two `ends`; of nothing where one of them has no tokens."""
    sizes = lengths.reshape(-1, 2)
    whole = (sizes > 0).all(axis=1)  # [pairs]
    tokens = np.insert(tokens, np.cumsum(lengths), np.tile(ends, len(sizes)))
    joined = sizes.sum(axis=1, dtype=np.int32) + np.int32(2)
    return tokens[np.repeat(whole, joined)], np.where(whole, joined, np.int32(0))


def normalized(text: str, form: str) -> str:
    """`text` in a Unicode normal form: "nfc", "nfkc", or as it is with "none"."""
    if form == "none" or text.isascii():
        return text
    return unicodedata.normalize("NFC" if form == "nfc" else "NFKC", text)


def hash_texts(texts: Iterable[str]) -> npt.NDArray[np.uint64]:
    """BLAKE2b of each text in UTF-8, 64 bits, [texts] uint64: the same on every machine."""
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts]
    return np.frombuffer(b"".join(digests), dtype="<u8").astype(np.uint64)


def select(
    keep: npt.NDArray[np.bool_], tokens: npt.NDArray[Any], lengths: npt.NDArray[Any], hashes: npt.NDArray[np.uint64]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[np.uint64]]:
    """The tokens, lengths and hashes (if there are any) of the documents where `keep`, [documents], is true."""
    if keep.all():
        return tokens, lengths, hashes
    return tokens[np.repeat(keep, lengths)], lengths[keep], hashes[keep] if hashes.size else hashes


def _texts(block: Block, settings: EncodingSettings, problems: list[Problem]) -> list[str]:
    options = settings.text
    texts = clean_texts(block, options.text_key, options.max_document_bytes)
    if texts is not None:
        return texts
    texts = []
    for record in parse_block(block, options.text_key, options.max_document_bytes):
        if not isinstance(record, Problem):
            texts.append(record.text)
            continue
        problems.append(record)
        if options.on_error == "raise":
            break
    return texts


def _within_limits(arrays: _Arrays, limits: DocumentConfig, skipped: Counter[str]) -> _Arrays:
    """Leaves out documents that have no tokens, too few or too many, and counts them in `skipped`."""
    lengths = arrays[1]
    no_tokens = int((lengths == 0).sum())
    skipped["no_tokens"] += no_tokens
    skipped["too_short"] += int((lengths < limits.min_tokens).sum()) - no_tokens
    keep = lengths >= limits.min_tokens
    if limits.max_tokens_per_document is not None:
        short_enough = lengths <= limits.max_tokens_per_document
        skipped["too_long"] += int((~short_enough).sum())
        keep &= short_enough
    return select(keep, *arrays)


class EncoderPool:
    """Worker processes that read and encode text.

        with EncoderPool(2, settings) as pool:
            for encoded in pool.encode([block] for block in blocks): ...

    They end with the block, at once if it ends by an exception, and by themselves if this process dies.

    Args:
        num_workers: processes, at least 1.
        settings: sent to each of them.
        tokenizer: the one in `tokenizer_folder`; forks share it, other processes load their own.
    """

    def __init__(self, num_workers: int, settings: EncodingSettings, tokenizer: Any = None) -> None:
        self._settings = settings
        self._tokenizer = tokenizer if can_fork() else None
        self._num_workers = num_workers
        self._workers: dict[Connection, BaseProcess] = {}

    def __enter__(self) -> EncoderPool:
        try:
            for _ in range(self._num_workers):
                connection, process = start_child(_work, self._settings, self._tokenizer)
                self._workers[connection] = process
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()

    def encode(self, tasks: Iterable[Sequence[Part | Block]]) -> Iterator[EncodedBlock]:
        """Calls `encode_blocks` for each of `tasks`; the results come in their order.

        Raises:
            UserError: from making the tasks or from a worker.
            RuntimeError: a worker failed or was killed.
        """
        source = enumerate(tasks)
        pending = next(source, None)
        given: dict[Connection, deque[int]] = {connection: deque() for connection in self._workers}
        finished: dict[int, EncodedBlock] = {}
        turn = 0
        while pending is not None or turn in finished or any(given.values()):
            while pending is not None and pending[0] < turn + _AHEAD * self._num_workers:
                connection = min(given, key=lambda worker: len(given[worker]))
                if len(given[connection]) >= _max_in_flight(pending[1]):
                    break
                given[connection].append(pending[0])
                self._send(connection, pending[1])
                pending = next(source, None)  # made while the workers work
            if turn in finished:
                yield finished.pop(turn)
                turn += 1
                continue
            busy = [connection for connection, numbers in given.items() if numbers]
            ready = wait([*busy, *(self._workers[connection].sentinel for connection in busy)])
            for connection in busy:
                if connection in ready:
                    finished[given[connection].popleft()] = receive(connection, self._workers[connection])
            for connection in busy:
                if given[connection] and self._workers[connection].sentinel in ready and not connection.poll():
                    raise death(self._workers[connection])

    def _send(self, connection: Connection, task: Sequence[Part | Block]) -> None:
        try:
            connection.send(task)
        except OSError as error:
            raise death(self._workers[connection]) from error

    def _stop(self) -> None:
        for process in self._workers.values():
            process.terminate()  # all at once; then each is waited for
        for connection, process in self._workers.items():
            stop_child(connection, process)
        self._workers = {}


def _max_in_flight(task: Sequence[Part | Block]) -> int:
    """How many tasks a worker may hold with this one: two, so that it need not wait for the next.

    Text is sent to idle workers only: while a worker sends, it does not read, and both sides would wait for ever.
    """
    return 2 if all(isinstance(item, Part) for item in task) else 1


def _work(connection: Connection, settings: EncodingSettings, tokenizer: Any) -> None:
    """A worker: receives tasks, sends an `EncodedBlock` or an error for each, until the parent closes the pipe."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread each: the processes share the cores
    keep_freed_blocks(1 << 24)
    gc.freeze()
    gc.set_threshold(200_000)  # thousands of lists of ids, without cycles: looking for cycles took 12 % of the time

    def encode(task: Sequence[Part | Block]) -> EncodedBlock:
        nonlocal tokenizer
        if tokenizer is None:
            tokenizer = _load(settings)
        return encode_blocks(task, tokenizer, settings)

    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        if not send_result(connection, encode, task):
            return


def _load(settings: EncodingSettings) -> Any:
    from ftk.plugins import import_entry_points, import_user_dir
    from ftk.tokenizers import load_tokenizer

    import_entry_points()
    if settings.user_dir is not None:
        import_user_dir(settings.user_dir)
    return load_tokenizer(settings.tokenizer_folder)
