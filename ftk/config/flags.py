"""Flat flags, fairseq style, made from the config dataclasses: `--seq-length 512` for `task.seq_length`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Sequence
from typing import Any

from ftk.config.build import report
from ftk.config.needs import needs_text
from ftk.config.options import MISSING, Option
from ftk.config.parts import Group
from ftk.config.root import Slot, Tree, slots_of
from ftk.config.unknown import misspelt_flags, unknown_arguments
from ftk.errors import UserError, with_flags

_MAX_LISTED = 40  # names of a choice


@dataclasses.dataclass
class Early:
    """What must be known before the other flags exist: plugins, the file, the chosen parts, --help.

    `values` are those of the options that the root's `BASE_FROM` names: section -> field -> value.
    `help` holds the words after --help; None: it is not given.
    """

    user_dir: str | None
    config: str | None
    names: dict[str, str]
    values: Tree
    help: list[str] | None
    version: bool


class Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and never guesses at abbreviations."""

    def __init__(self, prog: str = "", **text: Any) -> None:
        super().__init__(prog=prog, add_help=False, allow_abbrev=False, formatter_class=_formatter, **text)

    def error(self, message: str) -> Any:
        if lacking := re.fullmatch(r"argument (\S+): expected .*arguments?", message):
            flag = lacking[1].rpartition("/")[2]  # of -a/--arch
            raise UserError(f"{flag} needs a value{self._values(flag)}")
        raise UserError(message)

    def _values(self, flag: str) -> str:
        """For messages: what may stand behind a flag, where that is a choice."""
        # Not argparse's own `choices`, which would refuse a wrong value in its own words.
        names = [*(getattr(self._option_string_actions[flag], "names", None) or ())]
        if len(names) > _MAX_LISTED:
            return f"; --help {flag.lstrip('-')} shows all"
        return f": one of {', '.join(map(str, names))}" if names else ""


def read_early(root: type, argv: Sequence[str], options: Sequence[Option]) -> Early:
    """Reads the flags that decide which other flags exist. `options`: those of the command's sections."""
    decisive = [option for option in options if option.key in getattr(root, "BASE_FROM", ())]
    parser = Parser()
    parser.add_argument("--user-dir", action="append")
    parser.add_argument("--config")
    parser.add_argument("-h", "--help", nargs="*")
    parser.add_argument("--version", action="store_true")
    for key, slot in slots_of(root).items():
        parser.add_argument(*slot.flags, dest=f"slot:{key}").names = slot.choices  # type: ignore[attr-defined]
    for option in decisive:
        parser.add_argument(option.flag, *option.former, dest=option.key)
    known, _ = parser.parse_known_args(list(argv))
    names = {key: name for key in slots_of(root) if (name := getattr(known, f"slot:{key}")) is not None}
    values: Tree = {}
    for option in decisive:
        if (text := getattr(known, option.key)) is not None:
            values.setdefault(option.section, {})[option.name] = option.convert(text)
    config = known.config if any(option.flag == "--config" for option in options) else None
    user_dirs = list(dict.fromkeys(known.user_dir or []))
    if len(user_dirs) > 1:
        raise UserError(f"--user-dir is given twice; several plugins are --user-dir {os.pathsep.join(user_dirs)}")
    return Early(next(iter(user_dirs), None), config, names, values, known.help, known.version)


def parse(root: type, prog: str, argv: Sequence[str], groups: list[Group]) -> Tree:
    """The options that were given explicitly: section -> field -> value.

    Args:
        groups: the options of the sections and of the chosen parts.

    Raises:
        UserError: unknown flags, two options that want one flag. What is no value of its option stays text, which
            `build` reports together with all else.
    """
    parser = Parser(prog)
    owners = add_flags(parser, root, groups)
    known, unknown = parser.parse_known_intermixed_args(list(argv))  # positional arguments may be apart
    if unknown:
        raise UserError(report(unknown_arguments(unknown, prog, root, owners)))
    by_dest = {option.key: option for group in groups for option in group.options}
    given: Tree = {}
    for dest, value in vars(known).items():
        if dest in by_dest:
            option = by_dest[dest]
            with contextlib.suppress(ValueError):
                value = option.convert(value)
            given.setdefault(option.section, {})[option.name] = value
    return given


def refuse_misspelt(root: type, prog: str, argv: Sequence[str], groups: list[Group]) -> None:
    """Where the parts are not known whose options a command line may have: refuses flags that no part has.

    Raises:
        UserError: there are such flags.
    """
    parser = Parser(prog)
    owners = add_flags(parser, root, groups)
    _, unknown = parser.parse_known_intermixed_args(list(argv))
    if misspelt := misspelt_flags(unknown, prog, root, owners):
        raise UserError(report(misspelt))


def add_flags(parser: Parser, root: type, groups: list[Group]) -> dict[str, str]:
    """Give a parser the flags of every command, of the root's slots and of the groups; flag -> whose it is.

    Raises:
        UserError: two options want one flag.
    """
    general = parser.add_argument_group("general")
    general.add_argument(
        "-h", "--help", nargs="*", metavar="WORD", help="what is used daily; all: every option; WORD: a search"
    )
    general.add_argument("--traceback", action="store_true", help="show tracebacks of errors")
    general.add_argument("--version", action="store_true", help="print the version and stop")
    owners = {flag: flag for flag in ("--help", "--version", "--traceback")} | {"-h": "--help"}
    if slots := slots_of(root):
        parts = parser.add_argument_group("parts (name one and add --help all to see its options)")
        for key, slot in slots.items():
            _claim(owners, slot.flag, f"the choice of {key}")
            add_slot(parts, key, slot, slot.choices.names())
    known = {option.name: option for group in groups for option in group.options}
    for group in groups:
        added = parser.add_argument_group(group.title)
        for option in (o for o in group.options if not o.derived):
            for flag in (*option.flags, *option.former):
                _claim(owners, flag, option.key)
            add_option(added, option, option_help(option, group.presets.get(option.name, option.default), known))
    return owners


def add_slot(group: Any, key: str, slot: Slot, names: Sequence[str]) -> argparse.Action:
    """Add the flag that chooses a part; `names` are those that its help lists."""
    default = f"; default: {slot.default}" if slot.default else ""
    if slot.default_from:
        default = f"; default: the {slot.default_from}'s" + (f", else {slot.default}" if slot.default else "")
    text = f"{with_flags(slot.help) or key}: {', '.join(names)}{default}".replace("%", "%%")
    action = group.add_argument(*slot.flags, dest=f"slot:{key}", default=argparse.SUPPRESS, metavar="NAME", help=text)
    action.names = names
    return action


def add_option(group: Any, option: Option, help: str) -> argparse.Action:
    """Add the flag of an option, and those that it had."""
    arguments: dict[str, Any] = {"default": argparse.SUPPRESS}
    if option.positional:
        arguments |= {"nargs": "*" if option.is_list else "?", "metavar": option.flag}
        return group.add_argument(option.key, help=help, **arguments)
    arguments["dest"] = option.key
    if option.kind is bool and not option.is_list:
        arguments["action"] = argparse.BooleanOptionalAction
    else:
        arguments |= {"metavar": _metavar(option), "nargs": "+" if option.several else None}
    for flag in option.former:
        group.add_argument(flag, help=argparse.SUPPRESS, **arguments)
    action = group.add_argument(option.flag, help=help, **arguments)
    action.names = option.choices
    return action


def option_help(option: Option, default: Any, known: dict[str, Option]) -> str:
    """The help text of an option, with its unit where the text does not give it, interval, default, and its needs."""
    notes = [option.unit] if option.unit and not re.search(rf"\b{re.escape(option.unit)}\b", option.help) else []
    if option.within is not None:
        notes.append(option.within)
    if default is MISSING:
        notes.append(required_note(option, known))
    elif default is not None and (shown := shown_default(default)):
        notes.append(f"default: {shown}")
    if needs := needs_text(option, known):
        notes.append(f"needs {needs}")
    return help_line(option.help, notes)


def required_note(option: Option, known: dict[str, Option]) -> str:
    """For the help of an option that must be given."""
    return f"required without {known[option.instead].flag}" if option.instead in known else "required"


def help_line(text: str, notes: list[str]) -> str:
    """A help text as argparse takes it, with notes in brackets."""
    return (with_flags(text) + (f" ({'; '.join(map(str, notes))})" if notes else "")).replace("%", "%%")


def _claim(owners: dict[str, str], flag: str, owner: str) -> None:
    if flag in owners:
        raise UserError(
            f"{owners[flag]} and {owner} both have the flag {flag}; give one of the fields another "
            f"name, or metadata {{'flag': '--other'}}"
        )
    owners[flag] = owner


def shown_default(default: Any) -> str:
    """A default as it would be written on the command line."""
    if isinstance(default, bool):
        return str(default).lower()
    return ",".join(map(str, default)) if isinstance(default, list) else str(default)


def _metavar(option: Option) -> str:
    if option.metavar is not None:
        return option.metavar
    if option.choices is not None:
        return "{" + ",".join(map(str, option.choices)) + "}"
    one = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}[option.kind]
    return f"{one},{one},..." if option.is_list else one


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(110, max(60, shutil.get_terminal_size().columns))
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=width)
