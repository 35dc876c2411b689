"""What an argument that a command does not have is answered with."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

from ftk.config.foreign import names_for
from ftk.config.parts import options_by_part, options_elsewhere, owner
from ftk.config.root import slots_of
from ftk.errors import closest

_FLAG = re.compile(r"--?[A-Za-z]")
_MAX_SUGGESTIONS = 3
_MIN_PREFIX_LETTERS = 4  # letters of a name that is taken for the beginning of another


def unknown_arguments(arguments: Sequence[str], prog: str, root: type, known: Iterable[str]) -> list[str]:
    """A message for each unknown flag, or for the first argument where none of them is a flag.

    Args:
        arguments: what was left over of the command line.
        known: the flags that it has with the parts that are chosen.
    """
    flags = _flags(arguments)
    if not flags:
        is_model = "--path" in known and os.path.isdir(arguments[0])
        hint = f"a model is given by --path; see {prog} --help" if is_model else f"see {prog} --help"
        if "--data-weights" in known and os.path.isdir(arguments[0]):
            hint = f"to blend folders write DATA,{arguments[0]}, and their shares by --data-weights"
        if arguments[0].startswith(("\u2013", "\u2014")):  # as text programs make of two hyphens
            hint = "write two hyphens, --, before the name of an option"
        return [f"unexpected argument {arguments[0]!r}; {hint}"]
    owners = _owners(root)
    return [_answer(flag, prog, owners, list(known)) for flag in flags]


def misspelt_flags(arguments: Sequence[str], prog: str, root: type, known: Iterable[str]) -> list[str]:
    """A message for each unknown flag that no part has which could be chosen; arguments as of `unknown_arguments`."""
    if not (flags := _flags(arguments)):
        return []
    owners = _owners(root)
    return [_answer(flag, prog, owners, list(known)) for flag in flags if _as_flag(flag) not in owners]


def _flags(arguments: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(argument.split("=")[0] for argument in arguments if _FLAG.match(argument)))


def _as_flag(word: str) -> str:
    return f"--{word.lstrip('-').replace('_', '-')}"


def _owners(root: type) -> dict[str, str]:
    """The flags of all parts that could be chosen, and of other inputs -> whose they are."""
    found: dict[str, str] = {}
    for key, slot in slots_of(root).items():
        names: dict[str, list[str]] = {}
        for name, options in options_by_part(key, slot).items():
            for option in options:
                for flag in () if option.derived else option.flags:
                    names.setdefault(flag, []).append(name)
        found |= {flag: f"{owner(slot, parts)}; add that" for flag, parts in names.items()}
    elsewhere: dict[str, list[str]] = {}
    for whose, options in options_elsewhere(root).items():
        for option in options:
            for flag in option.flags:
                elsewhere.setdefault(flag, []).append(whose)
    return found | {flag: any_of(several) for flag, several in elsewhere.items()}


def any_of(whose: list[str]) -> str:
    """a thing b, a thing c -> a thing b, c"""
    start = whose[0].rpartition(" ")[0]
    return ", ".join([whose[0], *(name.removeprefix(f"{start} ") for name in whose[1:])])


def _answer(flag: str, prog: str, owners: dict[str, str], known: list[str]) -> str:
    """What is known of a flag that the command does not have: whose it is, ftk's name for it, or which one is near."""
    name = _as_flag(flag)
    if name in known:
        return f"unknown flag {flag}; did you mean {name}?"
    if name in owners:
        return f"{flag} belongs to {owners[name]}"
    everything = {*known, *owners}
    for row in names_for(prog, everything):
        if row.theirs == name:
            return f"unknown flag {flag}; {row.answer()}"
    guesses = _guesses(name, known)
    if not guesses:
        near = closest(name[2:], [each[2:] for each in everything])
        if near is not None and f"--{near}" not in known:
            whose = owners[f"--{near}"].partition(";")[0]
            return f"unknown flag {flag}; did you mean --{near}? It belongs to {whose}"
        guesses = [f"--{near}"] if near is not None else _with_words(name, known)
    hint = f"did you mean {' or '.join(guesses)}?" if guesses else f"{prog} --help WORD searches all options for a word"
    return f"unknown flag {flag}; {hint}"


def _guesses(name: str, known: list[str]) -> list[str]:
    """Flags that a name is the beginning of, whatever its dashes, or else the longest that it begins or ends with."""
    start = name.replace("-", "")
    longer = [each for each in known if each.replace("-", "").startswith(start)]
    if longer and len(start) >= _MIN_PREFIX_LETTERS:
        return longer[:_MAX_SUGGESTIONS]
    flags = [each for each in known if each.startswith("--")]  # -h is the end of many names
    parts = [each for each in flags if name.startswith(f"{each}-") or name.endswith(each[1:])]
    return sorted(parts, key=len)[-1:]


def _with_words(name: str, known: list[str]) -> list[str]:
    """Flags that have all the words of a name, the plural of one included."""
    words = {word.removesuffix("s") for word in name.split("-") if word}
    found = [each for each in known if words <= {word.removesuffix("s") for word in each.split("-")}]
    return found[:_MAX_SUGGESTIONS]
