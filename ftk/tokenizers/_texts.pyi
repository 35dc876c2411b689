"""Types of the compiled module _texts.pyx."""

from collections.abc import Iterable

def all_plain(texts: Iterable[str]) -> bool: ...
