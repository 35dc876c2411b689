"""The progress of commands that answer many prompts: a bar, rates, and lines that do not break the bar."""

from __future__ import annotations

import errno
import sys
import time
from typing import Any

from ftk.errors import counted, visible
from ftk.terminal import bar_width
from ftk_cli import ranks

BATCHES_AT_ONCE = 8
"""Number of batches whose prompts are sorted by length together, and held in memory. At each block's end rows are
idle: blocks of 4 batches take a fifth more steps, blocks of 16 one in twenty less (real lines, batches of 16)."""


class Meter:
    """Counts prompts and tokens, and the time that they take.

    Args:
        unit: of what is counted, e.g. "prompt".
        earlier: number of them in an earlier run.
        what: verb for the summary.
    """

    def __init__(self, unit: str, earlier: int, what: str = "answered") -> None:
        self.unit, self.earlier, self.what = unit, earlier, what
        self.count = self.num_tokens = 0
        self.started = self.loaded = time.perf_counter()

    def begin(self) -> None:
        """The model is loaded."""
        self.loaded = time.perf_counter()

    def add(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self.count += 1

    def rate(self) -> str:
        return f"{self.num_tokens / max(time.perf_counter() - self.loaded, 1e-9):.1f} tokens/s"

    def summary(self) -> str:
        seconds = time.perf_counter() - self.loaded
        earlier = f", after {self.earlier} of an earlier run" if self.earlier else ""
        return (
            f"{self.what} {counted(self.count, self.unit)} ({self.num_tokens} tokens) in {seconds:.1f} s "
            f"({self.rate()}){earlier}; loading took {self.loaded - self.started:.1f} s"
        )


def progress_bar(total: int | None, done: int, unit: str = "prompt") -> Any:
    """A bar on stderr with rate and time left; none where stderr is not a terminal, nor from further processes."""
    from tqdm import tqdm

    disable = None if ranks.rank() == 0 else True
    return tqdm(total=total, initial=done, unit=unit, disable=disable, file=sys.stderr, **bar_width(sys.stderr))


def tell(text: str, end: str = "\n") -> None:
    """Prints to stdout at once.

    Raises:
        BrokenPipeError: the reader has closed the pipe.
        OSError: it cannot be written; names stdout.
    """
    if sys.stdout is None and text:
        raise OSError(errno.EBADF, "is closed", "standard output")
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def say(prog: str, message: str) -> None:
    """Print a line on stderr, after the output so far; only rank 0 prints it."""
    if ranks.rank() != 0:
        return
    from tqdm import tqdm

    tell("", end="")
    tqdm.write(f"{prog}: {visible(message)}", file=sys.stderr)
