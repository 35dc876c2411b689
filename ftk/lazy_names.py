"""Names of a package that are loaded when they are first used, so that importing the package imports nothing heavy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, offered: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's `__getattr__` and `__dir__` (PEP 562).

    Args:
        package: its `__name__`; what it offers stands in its `__all__`.
        offered: module -> the names that it has, with spaces between.

    Returns:
        A function that loads a name, and raises AttributeError where the package has no such name; and one that lists
        the public names, loaded or not.
    """
    homes = {name: module for module, names in offered.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    def names() -> list[str]:
        return sorted(sys.modules[package].__all__)

    return get, names
