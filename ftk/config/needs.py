"""Options that have no effect without another one: said by their fields, held in one place.

A field's metadata has `"needs": {OPTION: VALUE}`, for instance `{"precision": "fp16"}`. OPTION is a field of any
section or chosen part, or a tuple of several of which one is enough; VALUE is one of

    True     any value but None, 0, "", [] and False
    "> 1"    a number above 1
    a tuple  one of these
    else     this value
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ftk.config.options import Option, options_of
from ftk.config.root import sections_of, slots_of

_ABOVE_ONE = "> 1"


def without_effect(config: Any, given: Collection[str], *, by_flag: bool = True) -> Iterator[str]:
    """A message for each option that was given and has no effect with the others as they are.

    An option at its default says nothing, nor does a number of 0, which switches something off.

    Args:
        given: keys of the options that the user gave: a run's config.yaml and recipes hold others, too.
        by_flag: name options by their flags instead of their keys.
    """
    values = {option.key: (option, value) for option, value in _values(config)}
    by_name = {option.name: (option, value) for option, value in values.values()}
    for key in given:
        option, value = values.get(key, (None, None))
        if option is None or value == option.default or (value == 0 and option.kind is not bool):
            continue
        unmet = [
            (present, wanted)
            for names, wanted in option.needs.items()
            if (present := [by_name[name] for name in _names(names) if name in by_name])
            and not any(_holds(found, wanted) for _, found in present)
        ]
        if unmet:
            flag = (option.flag.replace("--", "--no-", 1) if value is False else option.flag) if by_flag else key
            off = next(
                (other for others, _ in unmet for other, now in others if now is None is not other.default), None
            )
            if off is not None:  # given as none
                yield f"{flag} has no effect with {off.flag if by_flag else off.key} none; leave one of the two out"
            else:
                missing = " and ".join(
                    " or ".join(need_text(other, wanted, by_flag=by_flag) for other, _ in others)
                    for others, wanted in unmet
                )
                yield f"{flag} has no effect without {missing}; add that, or leave {flag} out"


def has_effect(section: Any, option: Option) -> bool:
    """Whether the others of its section have the values that an option needs."""
    needs = [([getattr(section, name, None) for name in _names(names)], one) for names, one in option.needs.items()]
    return all(any(_holds(value, wanted) for value in values) for values, wanted in needs)


def needs_text(option: Option, known: Mapping[str, Option]) -> str:
    """What an option needs, for --help; "" where that is nothing. `known`: the command's options by their names."""
    needs = [
        " or ".join(need_text(known[name], wanted) for name in _names(names) if name in known)
        for names, wanted in option.needs.items()
    ]
    return " and ".join(filter(None, needs))


def need_text(option: Option, wanted: Any, *, by_flag: bool = True) -> str:
    """An option with the value that is wanted of it."""
    name = option.flag if by_flag else option.key
    if wanted is True:
        return name
    if isinstance(wanted, tuple):
        return f"{name} {' or '.join(map(str, wanted))}"
    return f"{name} {'above 1' if wanted == _ABOVE_ONE else wanted}"


def _values(config: Any) -> Iterator[tuple[Option, Any]]:
    """The options of all sections and chosen parts, with their values."""
    parts = [(key, getattr(config, key)) for key in sections_of(type(config))]
    parts += [(key, getattr(config, key).config) for key in slots_of(type(config))]
    for key, part in parts:
        for option in options_of(key, type(part)) if part is not None else ():
            yield option, getattr(part, option.name)


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _holds(value: Any, wanted: Any) -> bool:
    if wanted is True:
        return bool(value)
    if wanted == _ABOVE_ONE:
        return (value or 0) > 1
    return value in wanted if isinstance(wanted, tuple) else bool(value == wanted)
