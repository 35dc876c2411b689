"""Flat flags, fairseq style, made from the config dataclasses: `--seq-length 512` for `task.seq_length`."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from ftk.builtins import FORMER_NAMES
from ftk.config.options import MISSING, Option, options_of
from ftk.config.root import Tree, sections_of, slots_of
from ftk.errors import UserError, visible, with_flags
from ftk.version import __version__

SlotOptions = list[tuple[str, str, list[Option], Tree]]


@dataclasses.dataclass
class Early:
    """What must be known before the other flags exist: plugins, the file, the chosen parts, --help."""

    user_dir: str | None
    config: str | None
    names: dict[str, str]
    help: bool
    version: bool


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of exiting, and never guesses at abbreviations."""

    def __init__(self, prog: str = "", description: str | None = None, usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=_formatter,
            usage=usage,
        )

    def error(self, message: str) -> Any:
        raise UserError(message)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(visible(message))  # argparse's own keeps a full disk to itself


def read_early(root: type, argv: Sequence[str]) -> Early:
    """Reads the flags that decide which other flags exist."""
    parser = _Parser()
    parser.add_argument("--user-dir")
    parser.add_argument("--config")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--version", action="store_true")
    for key, slot in slots_of(root).items():
        parser.add_argument(*slot.flags, dest=f"slot:{key}")
    known, _ = parser.parse_known_args(list(argv))
    names = {key: name for key in slots_of(root) if (name := getattr(known, f"slot:{key}")) is not None}
    has_config = any(o.flag == "--config" for _, _, options in _sections(root) for o in options)
    return Early(known.user_dir, known.config if has_config else None, names, known.help, known.version)


def parse(
    root: type, prog: str, description: str, argv: Sequence[str], slot_options: SlotOptions, names_only: bool = False
) -> Tree:
    """The options that were given explicitly: section -> field -> value.

    Args:
        root: root dataclass.
        prog, description: for --help.
        argv: arguments.
        slot_options: (key, part's name, its options, values it starts from) of each chosen part.
        names_only: --help lists the parts that can be chosen instead of their options.

    Raises:
        UserError: an unknown flag (with the closest known one), a bad value, two options that want one flag.
        SystemExit: after --help or --version.
    """
    places = [slot.place for slot in slots_of(root).values() if slot.place] if names_only else []
    places += [o.flag for _, _, options in _sections(root) for o in options if o.positional]
    places += [o.flag for _, _, options, _ in slot_options for o in options if o.positional]
    parser = _Parser(prog, description, usage=" ".join([prog, *places, "[options]"]))
    general = parser.add_argument_group("general")
    general.add_argument("-h", "--help", action="help", help="print this help and stop")
    general.add_argument("--traceback", action="store_true", help="show tracebacks of errors")
    version = f"ftk {__version__}"
    general.add_argument("--version", action="version", version=version, help="print the version and stop")
    by_dest: dict[str, Option] = {}
    owners: dict[str, str] = {
        "--help": "--help",
        "--version": "--version",
        "--traceback": "--traceback",
        "-h": "--help",
    }
    if slots_of(root):
        hint = " (name one and add --help to see its options)" if names_only else ""
        parts = parser.add_argument_group(f"parts{hint}")
        for key, slot in slots_of(root).items():
            _claim(owners, slot.flag, f"the choice of {key}")
            default = f"; default: {slot.default}" if slot.default else ""
            default = f"; default: the {slot.default_from}'s" if slot.default_from else default
            text = f"{with_flags(slot.help) or key}: {', '.join(slot.choices.names())}{default}".replace("%", "%%")
            parts.add_argument(*slot.flags, dest=f"slot:{key}", default=argparse.SUPPRESS, metavar="NAME", help=text)
    groups: SlotOptions = [(key, title, options, {}) for key, title, options in _sections(root)]
    groups += [(key, f"{key}: {name}", options, filled) for key, name, options, filled in slot_options]
    for _, title, options, filled in groups:
        group = parser.add_argument_group(title)
        for option in (o for o in options if not o.derived):
            _claim(owners, option.flag, option.key)
            by_dest[option.key] = option
            _add(group, option, filled.get(option.name, option.default))
    present = list(map(_with_present_name, argv))
    known, unknown = parser.parse_known_intermixed_args(present)  # positional arguments may be apart
    if unknown:
        raise UserError(_unknown(unknown[0], prog, owners))
    given: Tree = {}
    errors = []
    for dest, value in vars(known).items():
        if dest in by_dest:
            option = by_dest[dest]
            try:
                given.setdefault(option.section, {})[option.name] = option.convert(value)
            except ValueError as error:
                errors.append(str(error).replace(option.key, option.flag, 1))
    if errors:
        raise UserError("\n  ".join(errors))
    return given


def _with_present_name(argument: str) -> str:
    """An argument whose flag had another name once (`ftk.builtins.FORMER_NAMES`), with that of today."""
    flag, *value = argument.split("=", 1)
    name = FORMER_NAMES["option"].get(flag.removeprefix("--").replace("-", "_"))
    return argument if name is None or not flag.startswith("--") else "=".join([f"--{name.replace('_', '-')}", *value])


def _sections(root: type) -> list[tuple[str, str, list[Option]]]:
    """(key, title, options) of each group in --help: a section, or the parts that a section is put together from."""
    return [
        (key, title, options)
        for key, (section, config) in sections_of(root).items()
        for title, options in _groups(section.title, config, options_of(key, config))
    ]


def _groups(title: str, config: type, options: list[Option]) -> list[tuple[str, list[Option]]]:
    """A section's own options under its title, and those of each base class with a `group_title` under that."""
    names = {
        base.group_title: {field.name for field in dataclasses.fields(base)}
        for base in config.__bases__
        if hasattr(base, "group_title")
    }
    own = [option for option in options if not any(option.name in part for part in names.values())]
    return [(title, own), *((heading, [o for o in options if o.name in part]) for heading, part in names.items())]


def _claim(owners: dict[str, str], flag: str, owner: str) -> None:
    if flag in owners:
        raise UserError(
            f"{owners[flag]} and {owner} both want the flag {flag}; give one of the fields another "
            f"name, or metadata {{'flag': '--other'}}"
        )
    owners[flag] = owner


def _add(group: Any, option: Option, default: Any) -> None:
    text = _help(option, default)
    if option.positional:
        group.add_argument(
            option.key, nargs="*" if option.is_list else "?", default=argparse.SUPPRESS, metavar=option.flag, help=text
        )
    elif option.kind is bool and not option.is_list:
        group.add_argument(
            option.flag, dest=option.key, default=argparse.SUPPRESS, action=argparse.BooleanOptionalAction, help=text
        )
    else:
        group.add_argument(
            option.flag,
            dest=option.key,
            default=argparse.SUPPRESS,
            metavar=_metavar(option),
            nargs="+" if option.several else None,
            help=text,
        )


def _help(option: Option, default: Any) -> str:
    notes = [option.unit] if option.unit else []
    if default is not MISSING and default is not None:
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        shown = str(shown).lower() if isinstance(shown, bool) else shown
        if shown != "":
            notes.append(f"default: {shown}")
    elif default is MISSING:
        notes.append("required")
    text = with_flags(option.help) + (f" ({'; '.join(map(str, notes))})" if notes else "")
    return text.replace("%", "%%")


def _metavar(option: Option) -> str:
    if option.metavar is not None:
        return option.metavar
    if option.choices is not None:
        return "{" + ",".join(map(str, option.choices)) + "}"
    one = {int: "N", float: "X", bool: "BOOL", str: "TEXT"}[option.kind]
    return f"{one},{one},..." if option.is_list else one


def _unknown(argument: str, prog: str, owners: dict[str, str]) -> str:
    flag = argument.split("=")[0]
    if not flag.startswith("-"):
        return f"unexpected argument {argument!r}; see {prog} --help"
    close = difflib.get_close_matches(flag, owners, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see {prog} --help"
    return f"unknown flag {flag}; {hint}"


def _formatter(prog: str) -> argparse.HelpFormatter:
    width = min(110, max(60, shutil.get_terminal_size().columns))
    return argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=width)
