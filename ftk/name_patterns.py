"""Shell patterns that choose parameters and modules by name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a name of a parameter or module, or that of a module that holds it, matches a shell pattern.

    >>> matches("layers.0.norm.weight", "*norm"), matches("layers.0.norm.weight", "layers.?")
    (True, True)
    """
    return any(fnmatchcase(path, pattern) for path in _paths(name))


def examples(pattern: str, names: Iterable[str]) -> str:
    """For messages about a pattern that matches nothing: what it could have been."""
    known = dict.fromkeys(path for name in names for path in _paths(name))
    close = difflib.get_close_matches(pattern.strip("*."), known, n=3, cutoff=0.5) or list(known)[:3]
    return f"there are for example {', '.join(close)}"


def _paths(name: str) -> Iterator[str]:
    """A parameter's name and the modules that hold it: "a.b.weight" -> "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))
