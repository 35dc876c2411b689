"""What a checkpoint's files say, read as if by a stranger: each defect is a `BrokenCheckpoint`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftk.checkpoint.encoding import decode
from ftk.checkpoint.layout import CONFIG, TRAINER_STATE, BrokenCheckpoint, read_part
from ftk.checkpoint.storage import check_headers, read_index
from ftk.files import read_json, read_yaml

_NUMBER = (int, float)
_NONE = type(None)
_TRAINER_FIELDS: dict[str, tuple[type, ...]] = {  # where they are there: averaged and converted ones have few
    "num_updates": (int, _NONE),
    "iterator": (dict,),
    "best": (dict, _NONE),
    "validations_without_best": (int,),
    "validation_pending": (bool,),
    "scores": (dict,),
    "seconds": _NUMBER,
    "figures": (dict,),
    "lr_scheduler": (dict,),
    "loss_scale": (dict,),
    "tokenizer": (str, _NONE),
    "data": (str, _NONE),
    "data_processes": (int,),
}
_SECTIONS = ("common", "task", "dataset", "model", "criterion", "quantization")


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
        return config

    return read_part(folder / CONFIG, read)


def trainer_state_of(folder: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint.

    Raises:
        BrokenCheckpoint: it cannot be read, or one of its fields has a wrong type or is out of range.
    """

    def read(path: Path) -> dict[str, Any]:
        state = decode(read_json(path))
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("is not an object with the trainer's fields")
        for name, types in _TRAINER_FIELDS.items():
            if name in state and not _fits(state[name], types):
                raise ValueError(f"{name} is {state[name]!r:.40}, which no run has")
        return state

    return read_part(folder / TRAINER_STATE, read)


def content_problems(folder: Path, files: Iterable[str]) -> list[str]:
    """What is wrong with what the files say; their sizes and hashes have been checked, or do not matter.

    Args:
        folder: the checkpoint.
        files: those that are to be asked, by their names in the manifest.

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


def _fits(value: Any, types: tuple[type, ...]) -> bool:
    """Whether it is of a type, and if it is a number, one that counts something."""
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        return False
    return not isinstance(value, _NUMBER) or (math.isfinite(value) and 0 <= value < 1 << 63)


def _check_plain(value: Any) -> None:
    """Raises a ValueError for what YAML has and configurations have not: dates, sets, bytes, keys that are no names."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"has the key {key!r:.40}; a name is meant there")
            _check_plain(item)
    elif isinstance(value, list):
        for item in value:
            _check_plain(item)
    elif not isinstance(value, (bool, int, float, str, _NONE)):
        raise ValueError(f"holds a {type(value).__name__}, {value!r:.40}; plain values are meant there")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ValueError("holds a whole number of more than 64 bits")
