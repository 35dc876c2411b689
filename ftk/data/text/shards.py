"""A part of the inputs for each of several machines: ranges of bytes that make up all files, in their order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ftk.data.text.preprocess_config import Shard


class Share(NamedTuple):
    """What is read of a file of documents, or of two files of pairs.

    Attributes:
        files: one or two.
        start, stop: the documents that begin in these bytes of the first; `stop` None: up to its end.
        num_bytes: between them, for progress.
    """

    files: tuple[str, ...]
    start: int
    stop: int | None
    num_bytes: int

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the file."""
        return self.start == 0 and self.stop is None


def shares_of(files: Sequence[tuple[str, ...]], shard: Shard | None) -> Iterator[Share]:
    """The shares of one shard: shard I of N begins where the bytes of all files, back to back, pass (I - 1) / N.

    All shards together have every byte once. What cannot be cut belongs to the shard in which it begins, see
    `ftk.data.text.files.cut_file`.

    Args:
        files: of a split, in the order in which they are read.
        shard: which; None: all.
    """
    sizes = [os.path.getsize(first) for first, *_ in files]
    total, base = sum(sizes), 0
    lower, upper = (0, total) if shard is None else (total * n // shard.count for n in (shard.number - 1, shard.number))
    is_last = shard is None or shard.number == shard.count
    for names, size in zip(files, sizes, strict=True):
        start, stop = max(lower - base, 0), min(upper - base, size)
        reaches_end = upper - base >= size
        if start < stop or (size == 0 and lower <= base and (base < upper or is_last)):
            yield Share(names, start, None if reaches_end else stop, stop - start)
        base += size
