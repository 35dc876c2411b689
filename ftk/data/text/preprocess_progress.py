"""How far ftk-preprocess has read: a bar on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from ftk.data.text.encoding import EncodedBlock
from ftk.data.text.shards import Share
from ftk.terminal import bar_width

_SECONDS_PER_LINE = 10.0


class ReadingProgress:
    """How much of the files has been read, MB/s, documents/s, time left: a bar on a terminal, elsewhere lines.

    Args:
        shares: what is read, in this order; of two files that are read in step, the first counts.
    """

    def __init__(self, split: str, shares: Iterable[Share]) -> None:
        from tqdm import tqdm

        self._before: dict[str, int] = {}
        total = 0
        for share in shares:
            self._before[share.files[0]] = total - share.start
            total += share.num_bytes
        self._total = total
        options: dict[str, Any] = {"file": sys.stderr, **bar_width(sys.stderr)}
        if not sys.stderr.isatty():  # a log file or a pipe: a line now and then, none for a short run
            form = "{desc}: {percentage:.0f} % of {total_fmt}B, {rate_fmt}{postfix}, {remaining} left"
            options = {"file": _Lines(sys.stderr), "bar_format": form, "miniters": 1}
            options |= {"delay": _SECONDS_PER_LINE, "mininterval": _SECONDS_PER_LINE}
        self._bar = tqdm(total=total, desc=split, unit="B", unit_scale=True, **options)
        self._started = time.monotonic()

    def __enter__(self) -> ReadingProgress:
        return self

    def show(self, block: EncodedBlock, documents: int) -> None:
        rate = documents / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.0f} documents/s", refresh=False)
        done = self._before[block.source] + block.disk_bytes  # the last part of a range may end behind it
        self._bar.update(min(done, self._total) - self._bar.n)

    def __exit__(self, *error: object) -> None:
        self._bar.close()


class _Lines:
    """A stream that writes each state of a bar as a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if line := text.strip("\r\n "):
            self._stream.write(f"{line}\n")

    def flush(self) -> None:
        self._stream.flush()
