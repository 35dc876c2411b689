"""What --help prints: the options that people use daily, every option of the chosen parts, or those about a word."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ftk.config.flags import (
    Parser,
    add_flags,
    add_option,
    add_slot,
    help_line,
    option_help,
    required_note,
    shown_default,
)
from ftk.config.foreign import names_for
from ftk.config.options import MISSING, Option
from ftk.config.parts import Group, options_by_part, options_elsewhere, owner, section_groups
from ftk.config.root import Slot, slots_of
from ftk.config.unknown import any_of
from ftk.errors import UserError, with_flags

SCREEN = 48
"""Lines that --help without a word has at most; a command with fewer shows all its options."""

_NAMES_WIDTH = 26  # characters of parts' names in the short help

Heading = tuple[str, list[argparse.Action]]


def help_text(root: type, prog: str, description: str, words: Sequence[str], groups: list[Group]) -> str:
    """The text of `--help WORDS`.

    Args:
        words: none, "all", or words to search names and help texts for.
        groups: the options of the sections and of the chosen parts.

    Raises:
        UserError: no option has the words.
    """
    if words and list(words) != ["all"]:
        return _search(root, prog, [_normal(word) for word in words])
    places = [option.flag for group in groups for option in group.options if option.positional]
    usage = " ".join([prog, *places, "[options]"])
    whole = Parser(prog, description=description, usage=usage)
    add_flags(whole, root, groups)
    text = whole.format_help()
    if words or text.count("\n") <= SCREEN:
        return text
    formatter = Parser(prog)._get_formatter()
    formatter.add_usage(usage, [], [])
    formatter.add_text(description)
    own = "; with the NAME of a part, its own, too" if slots_of(root) else ""
    everywhere = " of all parts" if slots_of(root) else ""
    ending = (
        f"--help all shows every option{own}.\n--help WORD searches the options{everywhere}; WORD may be another "
        "program's name, too."
    )
    return _rendered(formatter, _daily(root, groups), ending)


def _daily(root: type, groups: list[Group]) -> Iterator[Heading]:
    """The parts with some of their names, and the options that are marked as daily but for the root's `RARE`."""
    sections = {option.section for group in groups for option in group.options}
    slots = slots_of(root)
    if slots:
        yield "parts", [add_slot(Parser(), key, slot, _cut(slot.choices.names())) for key, slot in slots.items()]
    parts = [*groups, *(_common(key, slot) for key, slot in slots.items() if key not in sections)]
    daily = [
        (option, group.presets.get(option.name, option.default))
        for group in parts
        for option in group.options
        if (option.daily or option.positional) and not option.derived and option.key not in getattr(root, "RARE", ())
    ]
    daily.sort(key=lambda item: (not item[0].positional, item[1] is not MISSING))  # what must be given stands first
    known = {option.name: option for group in parts for option in group.options}
    yield "options that are used daily", [_brief(option, default, known) for option, default in daily]


def _brief(option: Option, default: Any, known: dict[str, Option]) -> argparse.Action:
    """An option with the first clause of its help, and its default where that says something."""
    required = default is MISSING
    notes = [required_note(option, known)] if required else [f"default: {shown_default(default)}"] if default else []
    text = help_line(option.help.split(";")[0], notes)
    if option.kind is bool and not option.positional:
        return Parser().add_argument(option.flag, action="store_true", help=text)
    return add_option(Parser(), option, text)


def _common(key: str, slot: Slot) -> Group:
    """The options that several parts of a slot have in which none is chosen, without defaults that differ."""
    found: dict[str, list[Option]] = {}
    for options in options_by_part(key, slot).values():
        for option in options:
            found.setdefault(option.flag, []).append(option)
    common: list[Option] = []
    for first, *others in found.values():
        if others or first.positional:
            agree = all(other.default == first.default for other in others)
            common.append(first if agree else dataclasses.replace(first, default=None))
    return Group(key, common)


def _cut(names: list[str]) -> list[str]:
    """As many names as fit a line, and how many there are."""
    fitting = [name for place, name in enumerate(names) if len(", ".join(names[: place + 1])) <= _NAMES_WIDTH]
    return names if len(fitting) == len(names) else [*fitting, f"... ({len(names)} in all)"]


def _search(root: type, prog: str, words: list[str]) -> str:
    """The options and parts whose name or help text has all the words, and whose they are."""
    by_slot = {key: options_by_part(key, slot) for key, slot in slots_of(root).items()}
    options = [option for group in section_groups(root) for option in group.options]
    parts = [options for by_part in by_slot.values() for options in by_part.values()]
    flags = {flag for each in (options, *parts) for option in each for flag in option.flags}
    theirs = [row for row in names_for(prog, flags) if _has_all(row.theirs, words)]
    found = [heading for heading in _found(root, by_slot, words) if heading[1]]
    if not found and not theirs:
        text = " ".join(words)
        hint = "--help all shows every option" if text.isascii() else "help is in English, search an English word"
        raise UserError(f"no option is about {text!r}; {hint}")
    names = "".join(f"{row.theirs} ({', '.join(row.programs)}): {row.answer()}\n" for row in theirs)
    return f"{names}\n{_rendered(Parser(prog)._get_formatter(), found, '').lstrip()}".lstrip("\n")


def _found(root: type, by_slot: dict[str, dict[str, list[Option]]], words: list[str]) -> Iterator[Heading]:
    sections = section_groups(root)
    known = {option.name: option for group in sections for option in group.options}
    for group in sections:
        yield group.title, _shown([option for option in group.options if _matches(option, words)], known)
    for key, slot in slots_of(root).items():
        is_meant = _has_all(f"{slot.flag} {slot.help}", words)
        names = [name for name in slot.choices.names() if is_meant or _has_all(name, words)]
        yield "parts", [add_slot(Parser(), key, slot, names)] if names else []
        by_part = by_slot[key]
        for parts, options in _by_owner(by_part, words):
            every = len(parts) > 1 and len(parts) == len(by_part)
            if slot.architectures is not None:  # each has its own defaults
                options = [dataclasses.replace(option, default=None) for option in options]
            title = f"{key} (every {slot.flag})" if every else f"{key} ({owner(slot, list(parts))})"
            yield title, _shown(options, known | {option.name: option for option in by_part[parts[0]]})
    yield from _elsewhere(root, words, known)


def _elsewhere(root: type, words: list[str], known: dict[str, Option]) -> Iterator[Heading]:
    alike: dict[str, tuple[list[str], list[Option], dict[str, Option]]] = {}  # several may have the same options
    for whose, options in options_elsewhere(root).items():
        found = [option for option in options if _matches(option, words)]
        own = known | {option.name: option for option in options}
        alike.setdefault(repr(found), ([], found, own))[0].append(whose)
    for owners, found, own in alike.values():
        yield f"options of {any_of(owners)}", _shown(found, own)


def _by_owner(by_part: dict[str, list[Option]], words: list[str]) -> Iterator[tuple[tuple[str, ...], list[Option]]]:
    """(parts, the options that they have alike) of options that match, or of a part whose name is the word."""
    owners: dict[tuple[str, str, str], tuple[Option, list[str]]] = {}
    for part, options in by_part.items():
        for option in options:
            if _normal(part) == " ".join(words) or _matches(option, words):
                alike = (option.flag, option.help, str(option.default))
                owners.setdefault(alike, (option, []))[1].append(part)
    by_owners: dict[tuple[str, ...], list[Option]] = {}
    for option, parts in owners.values():
        by_owners.setdefault(tuple(parts), []).append(option)
    yield from by_owners.items()


def _shown(options: list[Option], known: dict[str, Option]) -> list[argparse.Action]:
    return [
        add_option(Parser(), option, option_help(option, option.default, known))
        for option in options
        if not option.derived
    ]


def _matches(option: Option, words: list[str]) -> bool:
    return _has_all(f"{option.flag} {with_flags(option.help)} {' '.join(map(str, option.choices or ()))}", words)


def _has_all(text: str, words: list[str]) -> bool:
    return all(word in _normal(text) for word in words)


def _normal(text: str) -> str:
    return text.lower().replace("-", " ").replace("_", " ").strip()


def _rendered(formatter: argparse.HelpFormatter, headings: Iterable[Heading], ending: str) -> str:
    for title, actions in headings:
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    formatter.add_text(ending)
    return formatter.format_help()
