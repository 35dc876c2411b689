"""What an option is: one field of a config dataclass, with its type, help, unit and choices."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
import types
import typing
from collections.abc import Container, Iterator, Mapping
from typing import Any, TypeVar

from ftk.builtins import FORMER_NAMES
from ftk.errors import UserError, download_hint, shown
from ftk.files import expand_home
from ftk.registry import named

MISSING = dataclasses.MISSING
MAX_WHOLE, MAX_NUMBER = 10**15, 1e30
"""Default bounds of numbers, above zero and below: a larger value is a slip, and would overflow later."""

NONE = ("none", "null")
"""Texts that mean None where an option may be None."""

_NUMBERS: dict[type, str] = {int: "a whole number", float: "a finite number"}
_PATHS = ("PATH", "DIR", "FILE")  # metavars of fields that are paths


T = TypeVar("T")


def option(default: T, help: str, within: str | None = None, **metadata: Any) -> T:
    """A field of a config dataclass; a list is copied for each instance.

    Args:
        default: its value where none is given.
        help: for --help.
        within: where a number, or each number of a list, lies: an interval such as "(0, 1]" or "[0, inf)".
        metadata: what `Option` describes; "min" and "max" in place of `bounds`; "count": how many numbers a list has.

    Raises:
        ValueError: `within` is no interval.
    """
    if within is not None:
        _interval(within)
    described = {"help": help, "within": within, **metadata}
    if isinstance(default, list):
        factory: Any = default.copy
        return dataclasses.field(default_factory=factory, metadata=described)
    return dataclasses.field(default=default, metadata=described)


def required(help: str, **metadata: Any) -> Any:
    """As `option`, for a value that must be given."""
    return dataclasses.field(metadata={"help": help, **metadata})


@dataclasses.dataclass(frozen=True)
class Option:
    """One field of a config dataclass.

    Attributes:
        section: key of the section in the configuration, e.g. "task".
        name: field name, e.g. "seq_length".
        kind: int, float, bool or str: the type of the value, or of each item of a list.
        is_list: whether the value is a list of `kind`.
        optional: whether None is allowed.
        default: default value, `MISSING` where one must be given.
        help, unit, choices: from the field's metadata; choices may be a function that lists what is registered.
        flag: command-line flag, e.g. "--seq-length"; for a positional argument its shown name, e.g. "DATA".
        positional: whether it is given by place instead of by flag.
        derived: filled in by the program (kept in YAML, no flag).
        several: a list whose items are separate arguments, `--inputs A B C`, instead of one, `--betas 0.9,0.98`.
        metavar: what stands for the value in --help; None: a word for its type.
        resume: what a change of it means when a run is continued, see `ftk.config.changes`; None: as its section.
        within: where numbers lie, in words, e.g. "above 0 and at most 1".
        bounds: least and greatest value of numbers; infinity is one only where a bound is infinite.
        path: whether the text is a path, in which `~` is the home folder.
        daily: whether --help shows it without being asked for all.
        needs: what it has no effect without: option -> value, see `ftk.config.needs`.
        instead: an option that may be given in place of a required one.
        former: flags that it had, which are still read.
    """

    section: str
    name: str
    kind: type
    is_list: bool
    optional: bool
    default: Any
    help: str
    unit: str | None
    choices: tuple[Any, ...] | None
    flag: str
    positional: bool
    derived: bool
    several: bool
    metavar: str | None
    resume: str | None
    within: str | None
    bounds: tuple[float, float]
    path: bool
    daily: bool
    needs: Mapping[str | tuple[str, ...], Any]
    instead: str | None
    former: tuple[str, ...]
    former_default: Any  # a default of earlier releases: in a file it counts as not given

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flag, and of a switch that which switches it off."""
        switch = self.kind is bool and not self.is_list and not self.positional
        return (self.flag, f"--no-{self.flag[2:]}") if switch else (self.flag,)

    def convert(self, value: Any) -> Any:
        """`value`, from YAML or from the command line, in this option's type.

        Raises:
            ValueError: it is not of this type or not among the choices; the message names what is allowed.
        """
        is_none = isinstance(value, str) and value.lower() in NONE and value not in (self.choices or ())
        if value is None or (self.optional and is_none):
            if not self.optional:
                raise ValueError(f"{self.key} is empty; it must be {self._expected()}")
            return None
        if self.is_list:
            return [self._convert_item(item) for item in _split(value)]
        return self._convert_item(value)

    def from_python(self, value: Any) -> Any:
        """As `convert`, for a value given by keyword: one text is a list of one, commas in it are its own.

        Raises:
            UserError: in place of ValueError; the message begins with the name alone.
        """
        try:
            return self.convert([value] if self.is_list and isinstance(value, str) else value)
        except (ValueError, OverflowError) as error:
            raise UserError(str(error).removeprefix(f"{self.section}.")) from None

    def _convert_item(self, value: Any) -> Any:
        try:
            item = _CONVERTERS[self.kind](value)
        except (LookupError, TypeError, ValueError, OverflowError):
            raise ValueError(f"{self.key} is {shown(value)}; it must be {self._expected()}") from None
        if self.choices is not None and item not in self.choices:
            raise ValueError(f"{self.key} is {shown(item)}; it must be one of {', '.join(map(str, self.choices))}")
        if self.kind in _NUMBERS:
            self._check_number(value, item)
        return self._expand(item) if self.path else item

    def _expand(self, text: str) -> str:
        if "hf://" in text:
            raise ValueError(f"{self.key} is {shown(text)}{download_hint(text, 'model')}")
        try:
            first, *more = re.split("([,:=])", text)  # of several paths in one text
            return "".join([expand_home(first), *map(os.path.expanduser, more)])
        except ValueError as error:
            raise ValueError(f"{self.key} is {shown(text)}; {error}") from None

    def _check_number(self, value: Any, number: float) -> None:
        if isinstance(number, float) and not math.isfinite(number) and number not in self.bounds:
            raise ValueError(f"{self.key} is {shown(value)}; it must be {self._expected()}")
        if isinstance(value, str) and underflows(value):
            raise ValueError(f"{self.key} is {shown(value)}, which is too small to differ from 0")
        if (wanted := _missed_bound(number, *self.bounds)) is not None:
            given = shown(value).strip("'")  # as it was written
            raise ValueError(f"{self.key} is {given}; it must be {wanted}")

    def _expected(self) -> str:
        item = {**_NUMBERS, bool: "true or false", str: "a text"}[self.kind]
        return f"a list, each item {item}" if self.is_list else item


def mistakes(config: Any) -> list[str]:
    """What is wrong with a dataclass of options: values that their fields do not allow, else what its `validate` says.

    Each message names a field, those of values at their beginning. `validate`, a generator of messages, is for what an
    interval, bounds and choices cannot say: of values that are wrong by themselves it is not asked.
    """
    return wrong_values(config, vars(config)) or list(getattr(config, "validate", tuple)())


def wrong_values(config: Any, values: Mapping[str, Any]) -> list[str]:
    """As `mistakes`, of values that are wrong by themselves.

    Args:
        config: a dataclass of options, or its type.
        values: those of its fields that are known.
    """
    fields = dataclasses.fields(config) if dataclasses.is_dataclass(config) else ()
    known = [field for field in fields if field.name in values]
    return [text for field in known if (text := _mistake(field.name, values[field.name], field.metadata))]


def _mistake(name: str, value: Any, metadata: Mapping[str, Any]) -> str | None:
    """What is wrong with a field's value, or with one of a list; None where it is allowed."""
    items = value if isinstance(value, list) else [] if value is None else [value]
    if isinstance(value, list) and len(value) != metadata.get("count", len(value)):
        return f"{name} is {shown(value)}; it must be {metadata['count']} numbers"
    verb = "holds" if items is value else "is"
    return next(
        (f"{name} {verb} {shown(item)}; it must be {text}" for item in items if (text := _wanted(item, metadata))), None
    )


def _wanted(value: Any, metadata: Mapping[str, Any]) -> str | None:
    """What one value must be instead; None where it is allowed."""
    choices, interval = metadata.get("choices"), metadata.get("within")
    choices = choices() if callable(choices) else choices
    if choices is not None and value not in choices:
        return f"one of {', '.join(map(str, choices))}"
    if interval is not None and not _lies_in(interval, value):
        return _words(interval)
    if "min" in metadata or "max" in metadata:
        return _missed_bound(value, metadata.get("min", -math.inf), metadata.get("max", math.inf))
    return None


def _missed_bound(number: float, least: float, greatest: float) -> str | None:
    """What a number must be that is not within its bounds; None for one that is."""
    if not number >= least:
        return f"at least {least:,}"
    return None if number <= greatest else f"at most {greatest:,}"


def _interval(text: str) -> tuple[str, str]:
    """Its ends, as they are written.

    Raises:
        ValueError: it is no interval; names the text.
    """
    try:
        low, high = text[1:-1].split(",")
        right = float(low) < float(high) and text[0] in "[(" and text[-1] in "])"
    except (IndexError, ValueError):
        right = False
    if not right:
        raise ValueError(f"an option is within {text!r}, which is no interval such as '(0, 1]' or '[0, inf)'")
    return low.strip(), high.strip()


def _lies_in(interval: str, number: float) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    above = number >= low if interval[0] == "[" else number > low
    return above and (number <= high if interval[-1] == "]" else number < high)


def _words(interval: str) -> str:
    low, high = _interval(interval)
    if interval[0] == "[" and interval[-1] == "]":
        return f"from {low} to {high}"
    parts = [f"at least {low}" if interval[0] == "[" else f"above {low}"] if low != "-inf" else []
    parts += [f"at most {high}" if interval[-1] == "]" else f"below {high}"] if high != "inf" else []
    return " and ".join(parts)


def _bounds_in_words(least: float | None, greatest: float | None) -> str | None:
    if least is None or greatest is None:
        return None if least is greatest else f"at most {greatest:,}" if least is None else f"at least {least:,}"
    return f"from {least:,} to {greatest:,}"


def underflows(text: str) -> bool:
    """Whether text is a number other than 0 that a float can only hold as 0, such as 1e-400."""
    try:
        return float(text) == 0.0 and any(digit in "123456789" for digit in text.lower().partition("e")[0])
    except ValueError:
        return False


_type_hints = functools.cache(typing.get_type_hints)  # it evaluates text


def options_of(section: str, config: type, names: Container[str] | None = None) -> list[Option]:
    """The options of a config dataclass, in the order of its fields; of these names alone, where some are given.

    Raises:
        UserError: a field of it is no option; names the class and its file.
    """
    try:
        hints = _type_hints(config)
        fields = [own for own in dataclasses.fields(config) if own.init and (names is None or own.name in names)]
        return [_option(section, field, hints[field.name]) for field in fields]
    except (NameError, TypeError) as error:
        raise UserError(f"{named(config)}: {error}") from error


def _option(section: str, field: dataclasses.Field[Any], hint: Any) -> Option:
    kind, is_list, optional, literal = _parse_hint(hint, f"{section}.{field.name}")
    if kind is bool and field.name.startswith("no_"):  # --no-x would switch `x` off, and there is no `x`
        raise TypeError(f"{section}.{field.name}: name a switch by what it turns on, without no_")
    default = field.default
    if default is MISSING and field.default_factory is not MISSING:
        default = field.default_factory()
    meta = field.metadata
    positional = bool(meta.get("positional", False))
    dashed = field.name.replace("_", "-")
    choices = meta.get("choices", literal)
    choices = choices() if callable(choices) else choices
    widest = MAX_WHOLE if kind is int else MAX_NUMBER
    for value in default if isinstance(default, list) else [] if default in (None, MISSING) else [default]:
        right = (int, float) if kind is float else kind
        if not isinstance(value, right) or isinstance(value, bool) != (kind is bool):
            raise TypeError(f"{section}.{field.name} is of type {kind.__name__}, but its default is {value!r}")
    return Option(
        section=section,
        name=field.name,
        kind=kind,
        is_list=is_list,
        optional=optional,
        default=default,
        help=meta.get("help", ""),
        unit=meta.get("unit"),
        choices=tuple(choices) if choices is not None else None,
        flag=meta.get("metavar", dashed.upper()) if positional else meta.get("flag", f"--{dashed}"),
        positional=positional,
        derived=bool(meta.get("derived", False)),
        several=bool(meta.get("several", False)),
        metavar=meta.get("metavar"),
        resume=meta.get("resume"),
        within=_words(meta["within"]) if meta.get("within") else _bounds_in_words(meta.get("min"), meta.get("max")),
        bounds=(meta.get("min", -widest), meta.get("max", widest)),
        path=bool(meta.get("path", kind is str and meta.get("metavar") in _PATHS)),
        daily=bool(meta.get("daily", False)),
        needs=meta.get("needs", {}),
        instead=meta.get("instead"),
        former=(*meta.get("former", ()), *_former_flags(field.name)),
        former_default=meta.get("former_default", MISSING),
    )


def current_name(name: Any) -> Any:
    """The name of today of an option in a file, which may have a former one, or be no name at all."""
    return FORMER_NAMES["option"].get(name, name) if isinstance(name, str) else name


def _former_flags(name: str) -> Iterator[str]:
    for old, present in FORMER_NAMES["option"].items():
        if present == name:
            yield f"--{old.replace('_', '-')}"


def _parse_hint(hint: Any, key: str) -> tuple[type, bool, bool, tuple[Any, ...] | None]:
    """(kind, is_list, optional, literal choices) of a type annotation."""
    optional = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        optional = len(members) < len(typing.get_args(hint))
        if len(members) != 1:
            raise TypeError(f"{key}: {hint} is not an option type; use one type, with None or without")
        hint = members[0]
    is_list = typing.get_origin(hint) is list
    if is_list:
        (hint,) = typing.get_args(hint)
    literal = None
    if typing.get_origin(hint) is typing.Literal:
        literal = typing.get_args(hint)
        hint = type(literal[0])
    if hint not in _CONVERTERS:
        raise TypeError(f"{key}: {hint} is not an option type; use int, float, bool, str or a list of them")
    return hint, is_list, optional, literal


def _split(value: Any) -> Iterator[Any]:
    if isinstance(value, str):
        yield from (item.strip() for item in value.strip("[]() ").split(",") if item.strip())
    elif isinstance(value, (list, tuple)):
        yield from value
    else:
        yield value


def _to_int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            value = float(value)  # so that 1e6 is a number of updates
    if int(value) != value:
        raise ValueError
    return int(value)


def _to_float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError
    return float(value)


def _to_bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    return {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[str(value).lower()]


def _to_str(value: Any) -> str:
    if isinstance(value, (dict, list)):
        raise ValueError
    return str(value)


_CONVERTERS: dict[type, Any] = {int: _to_int, float: _to_float, bool: _to_bool, str: _to_str}
