"""The contents of a checkpoint's files, read as untrusted input: each defect is a `BrokenCheckpoint`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ftk.checkpoint.encoding import decode
from ftk.checkpoint.index import check_headers, read_index
from ftk.checkpoint.layout import CONFIG, TRAINER_STATE, BrokenCheckpoint, read_part
from ftk.files import read_json, read_yaml

_NONE = type(None)
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
        BrokenCheckpoint: it cannot be read, or is no mapping.
    """

    def read(path: Path) -> dict[str, Any]:
        state = decode(read_json(path))
        if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
            raise ValueError("is not an object with the trainer's fields")
        return state

    return read_part(folder / TRAINER_STATE, read)


def content_problems(folder: Path, files: Iterable[str]) -> list[str]:
    """Problems in the contents of files.

    Args:
        folder: the checkpoint.
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
