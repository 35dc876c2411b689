"""The options of all commands."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import pkgutil
from collections.abc import Iterator

import ftk_cli
from ftk.config.options import Option
from ftk.config.parts import options_by_part, section_groups
from ftk.config.root import slots_of


def roots() -> dict[str, type]:
    """The root dataclasses of all commands, by the (first) module and their names."""
    found: dict[str, type] = {}
    for module in pkgutil.iter_modules(ftk_cli.__path__, "ftk_cli."):
        for name, root in vars(importlib.import_module(module.name)).items():
            if not isinstance(root, type) or not dataclasses.is_dataclass(root) or root in found.values():
                continue
            if any({"section", "slot"} & set(field.metadata) for field in dataclasses.fields(root)):
                found[f"{module.name.removeprefix('ftk_cli.')} {name}"] = root
    return found


ROOTS = roots()


def options_of_root(root: type) -> Iterator[Option]:
    """The options of all sections, and of all parts that can be chosen."""
    for group in section_groups(root):
        yield from group.options
    for key, slot in slots_of(root).items():
        for options in options_by_part(key, slot).values():
            yield from options


@functools.cache
def flags_of(root: type) -> set[str]:
    return {flag for option in options_of_root(root) for flag in option.flags} | {
        slot.flag for slot in slots_of(root).values()
    }
