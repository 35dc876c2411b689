"""A part and its options in one line of text, `NAME option=value …`, where a flag names several parts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from ftk.config.build import build_options
from ftk.config.root import Chosen
from ftk.errors import UserError
from ftk.parsing import parse_yaml
from ftk.registry import Registry


def choice(text: str, registry: Registry, where: str, preset: dict[str, Any] | None = None) -> Chosen:
    """The part that a line of text names, with its options as a checked dataclass.

    Args:
        text: a registered name, then options as `option=value`, values written as in YAML; quotes as in a shell.
        where: the option the text comes from, for messages.
        preset: values of options that the text does not give.

    Raises:
        UserError: no such name or option, or a value that the option does not take; all errors at once.
    """
    name, given = name_and_options(text, where)
    entry = registry.get(name)
    values = {key: value for key, value in (preset or {}).items() if value is not None} | given
    if entry.config is None:
        if values:
            raise UserError(f"{where}: {registry.kind} {name!r} has no options, but {', '.join(values)} is given")
        return Chosen(entry, None, None)
    return Chosen(entry, build_options(f"{where}: {name}", entry.config, values), None)


def name_and_options(text: str, where: str) -> tuple[str, dict[str, Any]]:
    """The name in a line of text, and the values of the options that it gives.

    Args:
        text, where: as of `choice`.

    Raises:
        UserError: the line cannot be read.
    """
    try:
        name, *pairs = shlex.split(text)
    except ValueError as error:
        raise UserError(f"{where}: {text!r} cannot be read ({error}); write NAME option=value ...") from error
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"{where}: {pair!r} in {text!r} is no option; write NAME option=value ...")
        try:
            values[key.replace("-", "_")] = parse_yaml(value)
        except ValueError as error:
            raise UserError(f"{where}: the value of {pair!r} {error}") from error
    return name, values


def named_lines(entries: Sequence[str]) -> list[tuple[str, str]]:
    """Name and line, with options, of each part that is named.

    Args:
        entries: lines; one without options may be several names with commas between.
    """
    lines = [
        line for entry in entries for line in ([entry] if " " in entry.strip() else entry.split(",")) if line.strip()
    ]
    return [(line.split()[0], line.strip()) for line in lines]


def values_by_name(values: Sequence[str], names: Sequence[str], where: str) -> dict[str, list[str]]:
    """The values that are given to each of several names, as NAME=VALUE; of one name alone also as VALUE.

    Args:
        names: at least one.
        where: the option the values come from, for messages.

    Raises:
        UserError: a value has none of the names.
    """
    found: dict[str, list[str]] = {}
    for entry in values:
        name, equals, value = entry.partition("=")
        if equals and name in names:
            found.setdefault(name, []).append(value)
        elif len(set(names)) == 1:
            found.setdefault(names[0], []).append(entry)
        else:
            raise UserError(f"{where} {entry} names none of the evaluations; give {names[0]}={entry}")
    return found
