"""The exception class for mistakes that the user can fix, and helpers for messages."""

from __future__ import annotations

import difflib
import errno
import logging
import re
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ftk.parsing import fullwidth_hint


class UserError(Exception):
    """A mistake in what the user gave: a flag, a file, a configuration.

    The message names the mistake, its place (file:line, field) and the fix, in one or two lines. It names options by
    their field, in backticks; commands show the flag instead (`with_flags`).
    It is raised where the fact is known and printed once, without traceback, by the command
    (`ftk_cli.command.run`), which then exits with code 2.
    """


class Diverged(FloatingPointError):
    """A run whose values are no longer finite; as a `UserError` it says the way out, and the exit code is 1."""


@contextmanager
def naming_place(place: object, kind: type[Exception] = UserError) -> Iterator[None]:
    """Errors of this kind inside become UserErrors that start with the place; one that does so already stays."""
    try:
        yield
    except kind as error:
        if isinstance(error, UserError) and str(error).startswith(str(place)):
            raise
        raise UserError(f"{place}: {error}") from error


_OUT_OF_MEMORY = re.compile(
    r"out of memory|(can't|cannot|not enough memory:? (you tried )?to) allocate|bad_alloc|ALLOC_FAILED", re.I
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host's or a GPU's memory is used up; torch says so by a RuntimeError."""
    if isinstance(error, RuntimeError):
        return _OUT_OF_MEMORY.search(" ".join(str(error).split())) is not None
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


class LogFormatter(logging.Formatter):
    """Lines of the log: time, level, message; control characters are escaped.

    Args:
        place: the rank that logs, if there is more than one.
    """

    def __init__(self, place: str | None = None) -> None:
        parts = ["%(asctime)s", "%(levelname)s", *([place] if place else []), "%(message)s"]
        super().__init__(" | ".join(parts), datefmt="%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        return visible(with_flags(super().format(record)))


def with_flags(text: str) -> str:
    """A message or help text for the command line: `tensor_parallel_size` in backticks is `--tensor-parallel-size`."""
    return re.sub(r"`([a-z][a-z0-9_]*)`", lambda field: "--" + field[1].replace("_", "-"), text)


def in_python(text: str) -> str:
    """A message about flags for a caller in Python: `--max-len` is `max_len`."""
    return re.sub(r"--([a-z][a-z0-9-]*)", lambda flag: flag[1].replace("-", "_"), text)


_MAX_LISTED = 20  # names
_MIN_PART_LETTERS = 3  # letters of a name that is taken for a part of another


def did_you_mean(name: str, known: Collection[str]) -> str:
    """For messages about an unknown name: a known one that was meant, if there is one, and the list of all; or what
    else to write for a full-width sign in it.

    A long list is left out where there is one.
    """
    if (wide := fullwidth_hint(name)) is not None and not any(map(fullwidth_hint, known)):
        return wide
    close = nearest(name, known)
    hint = f"did you mean {close!r}?" if close is not None else ""
    if hint and len(known) > _MAX_LISTED:
        return hint
    return f"{hint} there are: {', '.join(known) or 'none'}".lstrip()


def nearest(name: str, known: Collection[str]) -> str | None:
    """The known name that is closest, or else the only one that holds `name` or is a part of it; None without one."""
    lower = name.lower()
    related = [
        each
        for each in known
        if len(min(lower, each, key=len)) >= _MIN_PART_LETTERS and (lower in each.lower() or each.lower() in lower)
    ]
    return closest(name, known) or (related[0] if len(related) == 1 else None)


def closest(name: str, known: Collection[str]) -> str | None:
    """The known name that `name` is a misspelling of, in about one letter of four, case apart; None without one."""
    by_spelling = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_spelling, n=1, cutoff=0.75)
    return by_spelling[found[0]] if found else None


def counted(number: int, noun: str, form: str = "") -> str:
    """For messages: "1 sample", "2 samples"; with the form "," also "1,024 samples"."""
    return f"{number:{form}} {noun}{'s' * (number != 1)}"


def shown(value: Any) -> str:
    """A value for a message, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"too large a {type(value).__name__}"
    length = len(value) if isinstance(value, str) else len(text)
    return text if len(text) <= 100 else f"{text[:80]} ... ({length:,} characters)"


def visible(text: str, keep: str = "\t\n") -> str:
    """Text for a terminal: control and format characters, which could steer it, as `\\xNN` or `\\uNNNN`.

    Args:
        text: whatever came from a file, a prompt or a model.
        keep: control characters that stay.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character
        if character in keep or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp")
        else character.encode("unicode_escape", "surrogatepass").decode("ascii")
        for character in text
    )


def download_hint(name: str, kind: str) -> str:
    """For messages about a path that is missing: what to do if it names something on the Hugging Face hub; else "".

    A path whose first folder exists is not taken for such a name. Advice about local files stands before the hint.

    Args:
        kind: "dataset" or "model", for names that do not say it.
    """
    scheme, separator, rest = name.partition("://")
    kind = "dataset" if rest.startswith("datasets/") else "model" if separator else kind
    words = (rest if separator else name).removeprefix("datasets/").split("/")
    is_hub_name = len(words) > 1 and all(re.fullmatch(r"\w[\w.-]*", word) for word in words[:2])
    is_file = not separator and (len(words) > 2 or re.search(r"\.[a-z]\w*$", name) is not None)
    if separator and (scheme != "hf" or not is_hub_name):
        return "; only files on this machine are read, download it first"
    if not is_hub_name or is_file or (not separator and Path(words[0]).exists()):
        return ""
    option = " --repo-type dataset" if kind == "dataset" else ""
    download = f"hf download {words[0]}/{words[1]}{option} --local-dir {words[1]}"
    return f"; to read a {kind} of the Hugging Face hub, download it ({download}) and give the folder {words[1]}"
