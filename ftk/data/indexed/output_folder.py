"""Output folders that are complete or absent: written under a temporary name next to their place, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftk.errors import UserError
from ftk.files import put_in_place, read_json, reason, sha256_of, sync_tree, temporary_folder

RECORD = "preprocess.json"
_Checks = Mapping[str, tuple[type, bool]]  # key -> its type, and whether it must be there
_FIELDS: dict[str, _Checks] = {
    "files": {"bytes": (int, True), "sha256": (str, False)},
    "splits": {"documents": (int, False), "tokens": (int, False)},
}
_TOKENIZER: _Checks = {"vocab_size": (int, True), "fingerprint": (str, True)}


def check_destination(destination: Path, overwrite: bool) -> None:
    """Refuses a destination that cannot be written, or whose replacement could lose files of others.

    Args:
        overwrite: whether it may exist.

    Raises:
        UserError: it is a file, it is not empty and `overwrite` is off, or it holds files that its
            `preprocess.json` does not list.
    """
    name = f"`destdir` {destination}"
    if not destination.exists() and not destination.is_symlink():
        for parent in destination.parents:
            if parent.exists() and not parent.is_dir():
                raise UserError(f"{name}: {parent} is a file, not a folder")
        return
    if not destination.is_dir():
        raise UserError(f"{name}: a file, not a folder; choose another name")
    if not any(destination.iterdir()):
        return
    if not overwrite:
        raise UserError(f"{name}: exists already; choose another, or replace it with `overwrite`")
    foreign = foreign_files(destination)
    if foreign:
        shown = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
        raise UserError(f"{name}: holds what ftk did not write ({shown}); move that away, or choose another folder")


def foreign_files(folder: Path) -> list[str]:
    """Files in `folder` that its `preprocess.json` does not list (all of them if it has none)."""
    listed = {RECORD}
    with contextlib.suppress(OSError, ValueError):  # no record: no file is known to be ours
        listed |= set(read_record(folder)["files"])
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if listed == {RECORD} or name not in listed)


def read_record(folder: Path) -> dict[str, Any]:
    """The `preprocess.json` of a folder; the values that ftk reads have been checked for their types.

    Raises:
        OSError: there is none, or it is no regular file.
        ValueError: it is no record; the message says where.
    """
    record = read_json(folder / RECORD)
    if not isinstance(record, dict):
        raise ValueError("is not a JSON object")
    for field, checks in _FIELDS.items():
        entries = record.get(field)
        if not isinstance(entries, dict):
            raise ValueError(f'has no object "{field}"')
        for name, entry in entries.items():
            if "\0" in name or name != os.path.normpath(name) or name.startswith(("/", "..")):
                raise ValueError(f'"{field}" names {name!r}, which is not a file in this folder')
            if not isinstance(entry, dict):
                raise ValueError(f'"{field}", {name!r}: is not an object')
            _check_entry(entry, checks, f'"{field}", {name!r}')
    tokenizer = record.get("tokenizer", "")
    if tokenizer is not None:  # null: converted to what has none
        if not isinstance(tokenizer, dict):
            raise ValueError('has no object "tokenizer"')
        _check_entry(tokenizer, _TOKENIZER, '"tokenizer"')
    return record


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Writes the `preprocess.json` of a folder that is being made."""
    text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    # A lone surrogate, in a field's name or for a byte of a file's name, becomes \udxxx: JSON's own escape.
    (folder / RECORD).write_text(text, encoding="utf-8", errors="backslashreplace")


def _check_entry(entry: Mapping[str, Any], checks: _Checks, where: str) -> None:
    for key, (kind, needed) in checks.items():
        if key not in entry and not needed:
            continue
        value: Any = entry.get(key)
        if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63):
            raise ValueError(f"{where}: {key} is not {'a whole number' if kind is int else 'a string'}")


@contextlib.contextmanager
def whole_folder(destination: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write to; it is renamed to its place when the block ends, and removed on an error.

    Args:
        destination: final place; its parents are made.
        overwrite: replace an existing folder, within the limits of `check_destination`.

    Yields:
        an empty folder next to `destination`.

    Raises:
        UserError: as of `check_destination`, or no folder can be made there.
    """
    check_destination(destination, overwrite)
    destination = destination.resolve()
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
    except (FileNotFoundError, PermissionError) as error:  # /proc/data, say
        raise UserError(f"`destdir` {destination}: no folder can be made there ({reason(error)})") from error
    with temporary_folder(destination) as part:
        yield part
        sync_tree(part)
        check_destination(destination, overwrite)  # another process may have written there meanwhile
        put_in_place(part, destination)


def describe_files(folder: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Name, bytes and sha256 of every file in a folder, in the order of the names.

    Args:
        known: name -> sha256, of files that need not be read for it.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: {"bytes": path.stat().st_size, "sha256": known.get(name) or sha256_of(path)}
        for name, path in files.items()
    }
