"""The contents of a checkpoint's files, read as untrusted input: each defect is a `BrokenCheckpoint`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ftk.checkpoint.encoding import decode
from ftk.checkpoint.index import read_index
from ftk.checkpoint.layout import CONFIG, TRAINER_STATE, BrokenCheckpoint, read_part
from ftk.checkpoint.reading import check_headers
from ftk.errors import shown
from ftk.files import read_json, read_yaml

_NONE = type(None)
_MAX_WHOLE = 1 << 63
_MAX_LOSS_SCALE = 2.0**64

Check = Callable[[Any], bool]


def _whole(least: int = 0) -> Check:
    """A whole number of at most 64 bits."""
    return lambda value: type(value) is int and least <= value < _MAX_WHOLE


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) < _MAX_WHOLE)


def _figure(value: Any) -> bool:
    """A validation figure, which may be infinite."""
    return _number(value) and not math.isnan(value)


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _or(other: Any, check: Check) -> Check:
    return lambda value: (type(value) is type(other) and value == other) or check(value)


def _row(*checks: Check) -> Check:
    return lambda value: (
        isinstance(value, list)
        and len(value) == len(checks)
        and all(check(item) for check, item in zip(checks, value, strict=True))
    )


def _each(check: Check) -> Check:
    """A mapping with any strings as keys."""
    return lambda value: (
        isinstance(value, dict) and all(isinstance(name, str) and check(item) for name, item in value.items())
    )


def _record(fields: dict[str, Check], optional: dict[str, Check] | None = None, *, others: bool = False) -> Check:
    """A mapping with these keys, and with others if `others`."""
    known = fields | (optional or {})
    return lambda value: (
        isinstance(value, dict)
        and fields.keys() <= value.keys()
        and (others or value.keys() <= known.keys())
        and all(known[name](item) for name, item in value.items() if name in known)
    )


_ORDERING = _record(
    {
        "batch_size": _or(None, _whole(1)),
        "max_tokens": _or(None, _whole(1)),
        "required_batch_size_multiple": _whole(1),
        "window": _whole(),
        "short_first": _whole(-1),
        "drop_long": _is(bool),
    }
)
_SCHEDULE = {  # of the built-in schedules; others may have other fields
    "drops": _whole(),
    "best": _or(None, _figure),
    "validations_without_better": _whole(),
    "cooldown_left": _whole(),
}
_TRAINER_FIELDS: dict[str, Check] = {  # all optional: averaged and converted checkpoints have few
    "num_updates": _or(None, _whole()),
    "iterator": _or({}, _record({"epoch": _whole(1), "samples_consumed": _whole()}, {"ordering": _ORDERING})),
    "best": _or(None, _record({"metric": _is(str), "value": _figure}, {"num_updates": _whole()})),
    "validations_without_best": _whole(),
    "validation_pending": _is(bool),
    "scores": _each(_figure),
    "seconds": lambda value: _number(value) and 0 <= value < _MAX_WHOLE,
    "figures": _or({}, _record({"meters": _each(_row(_number, _number)), "skipped": _row(_whole(), _whole())})),
    "lr_scheduler": _record({}, _SCHEDULE, others=True),
    "loss_scale": _or(
        {},
        _record(
            {"scale": lambda value: _number(value) and 0 < value <= _MAX_LOSS_SCALE, "counts": _row(*[_whole()] * 4)}
        ),
    ),
    "tokenizer": _or(None, _is(str)),
    "data": _or(None, _is(str)),
    "data_processes": _whole(1),
}
_SECTIONS = ("common", "task", "dataset", "model", "criterion", "adapter", "quantization")


def config_of(folder: Path) -> dict[str, Any]:
    """The configuration of a checkpoint, as plain dicts, lists, numbers and strings.

    Raises:
        BrokenCheckpoint: it cannot be read, or is no mapping of such values; a section is no mapping.
    """

    def read(path: Path) -> dict[str, Any]:
        config = read_yaml(path)
        if not isinstance(config, dict):
            raise ValueError("is not a mapping")
        _check_plain(config)
        for name in _SECTIONS:
            if not isinstance(config.get(name), (dict, _NONE)):
                raise ValueError(f"{name} is {config[name]!r:.40}; it must be a mapping")
        adapter = config.get("adapter")
        if adapter and not isinstance(adapter.get("_name"), str):
            raise ValueError("adapter has no _name, e.g. _name: lora")
        return config

    return read_part(folder / CONFIG, read)


def trainer_state_of(folder: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint.

    Raises:
        BrokenCheckpoint: it cannot be read, or a field has a value that no run writes.
    """

    def read(path: Path) -> dict[str, Any]:
        state = decode(read_json(path))
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("is not an object with the trainer's fields")
        for name, fits in _TRAINER_FIELDS.items():
            if name in state and not fits(state[name]):
                raise ValueError(f"{name} is {shown(state[name])}, which no run writes")
        return state

    return read_part(folder / TRAINER_STATE, read)


def content_problems(folder: Path, files: Iterable[str]) -> list[str]:
    """Problems in the contents of files.

    Args:
        files: the ones to check, by their names in the manifest.

    Returns:
        One line for each problem, beginning with the file's name.
    """
    problems = []
    for name in sorted(files):
        try:
            if name == CONFIG:
                config_of(folder)
            elif name == TRAINER_STATE:
                trainer_state_of(folder)
            elif Path(name).name == "index.json" and len(Path(name).parts) == 2:
                part = (folder / name).parent
                check_headers(part, read_index(part))
        except BrokenCheckpoint as error:
            problems.append(str(error).removeprefix(f"{folder}/"))
    return problems


def _check_plain(value: Any) -> None:
    """Raise a ValueError for YAML values that no configuration has: dates, sets, bytes, keys that are no strings."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"has the key {key!r:.40}; expected a name")
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, (bool, int, float, str, _NONE)):
        raise ValueError(f"holds a {type(value).__name__}, {value!r:.40}; expected plain values")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("holds a whole number of more than 64 bits")
