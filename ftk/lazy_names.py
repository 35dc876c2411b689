"""Names of a package that are loaded when they are first used, so that importing the package imports nothing heavy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """What the package has as its `__getattr__` (PEP 562).

    Args:
        package: its `__name__`.
        homes: name -> the module that has it.

    Raises:
        AttributeError: from the function returned, where the package has no such name.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(homes[name]), name)

    return get
