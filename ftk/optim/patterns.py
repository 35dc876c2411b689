"""Shell patterns that choose parameters by name."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase


def matches(name: str, pattern: str) -> bool:
    """Whether a parameter's name, or that of a module that holds it, matches a shell pattern.

    >>> matches("layers.0.norm.weight", "*norm"), matches("layers.0.norm.weight", "layers.?")
    (True, True)
    """
    return any(fnmatchcase(path, pattern) for path in paths(name))


def paths(name: str) -> Iterator[str]:
    """A parameter's name and the modules that hold it: "a.b.weight" -> "a", "a.b", "a.b.weight"."""
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))
