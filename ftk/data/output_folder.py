"""Output folders that are whole or absent: written beside their place under another name, then renamed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ftk.data.indexed_dataset import sync_folder
from ftk.errors import UserError

RECORD = "preprocess.json"


def check_destination(destination: Path, overwrite: bool, name: str | None = None) -> None:
    """Refuses a destination that cannot be written, or whose replacement could lose what is not ours.

    Args:
        destination: the folder.
        overwrite: whether it may exist.
        name: what it is called in messages; `--destdir ...` by default.

    Raises:
        UserError: it is a file, it is not empty and `overwrite` is off, or it holds files that its
            `preprocess.json` does not list.
    """
    name = f"--destdir {destination}" if name is None else name
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
        raise UserError(f"{name}: exists already; choose another, or replace it with --overwrite")
    foreign = foreign_files(destination)
    if foreign:
        shown = ", ".join(foreign[:3]) + (" ..." if len(foreign) > 3 else "")
        raise UserError(f"{name}: holds what ftk did not write ({shown}); move that away, or choose another folder")


def foreign_files(folder: Path) -> list[str]:
    """Files in `folder` that its `preprocess.json` does not list (all of them if it has none)."""
    listed = {RECORD}
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # no record: nothing in it is known as ours
        listed |= set(read_record(folder)["files"])
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return sorted(name for name in found if listed == {RECORD} or name not in listed)


def read_record(folder: Path) -> dict[str, Any]:
    """The `preprocess.json` of a folder, as it stands there."""
    return json.loads((folder / RECORD).read_text(encoding="utf-8"))


@contextlib.contextmanager
def whole_folder(destination: Path, overwrite: bool, name: str | None = None) -> Iterator[Path]:
    """A folder to write to; when the block ends it takes its place, and on an error it vanishes.

    Args:
        destination: final place; its parents are made.
        overwrite: replace what stands there, within the limits of `check_destination`.
        name: what it is called in messages.

    Yields:
        an empty folder beside `destination`.
    """
    check_destination(destination, overwrite, name)
    destination = destination.resolve()
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(f"{destination.name}.tmp-{os.getpid()}")
    part.mkdir()
    try:
        yield part
        for path in sorted(part.rglob("*")):
            if path.is_dir():
                sync_folder(path)
            else:
                _sync_file(path)
        sync_folder(part)
        check_destination(destination, overwrite, name)  # somebody may have written there meanwhile
        _replace(part, destination)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def describe_files(folder: Path, known: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Name, bytes and sha256 of every file in a folder, in the order of the names.

    Args:
        folder: the folder.
        known: name -> sha256, of files that need not be read for it.
    """
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: {"bytes": path.stat().st_size, "sha256": known.get(name) or sha256_of(path)}
        for name, path in files.items()
    }


def sha256_of(path: Path) -> str:
    """sha256 of a file, hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _replace(part: Path, destination: Path) -> None:
    old = destination.with_name(f"{destination.name}.old-{os.getpid()}")
    try:
        if destination.exists():
            os.rename(destination, old)
        os.rename(part, destination)
        sync_folder(destination.parent)
    finally:
        if old.exists() and not destination.exists():
            os.rename(old, destination)
        shutil.rmtree(old, ignore_errors=True)


def _sync_file(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
