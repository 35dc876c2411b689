"""The manifest: size and sha256 of every file of a checkpoint; writing a file returns its record."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftk.checkpoint.layout import CONFIG, MANIFEST, MODEL, TOKENIZER, TRAINER_STATE, BrokenCheckpoint, read_part
from ftk.files import MAX_JSON_BYTES, read_bytes
from ftk.parsing import parse_json

Buffer = bytes | bytearray | memoryview

_FORMAT = "ftk-checkpoint"
_VERSION = 1
_WRITE_BYTES = 16 << 20
_REQUIRED = (CONFIG, TRAINER_STATE, f"{MODEL}/index.json")


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a file when it was written."""

    size: int  # bytes
    sha256: str  # hex


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Read `manifest.json`, which contains a digest of its entries.

    Raises:
        BrokenCheckpoint: it is missing, empty, no JSON, changed, or of an unknown format.
    """
    path = folder / MANIFEST
    text = read_part(path, lambda path: read_bytes(path, MAX_JSON_BYTES))
    if not text.strip(b"\0 \n"):
        raise BrokenCheckpoint(f"{path}: empty")
    content = read_part(path, lambda _: parse_json(text))
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise BrokenCheckpoint(f"{path}: is not the manifest of an ftk checkpoint")
    if content.get("version") != _VERSION:
        raise BrokenCheckpoint(f"{path}: has version {content.get('version')!r:.40}; this ftk reads version {_VERSION}")
    entries = content.get("files")
    if not isinstance(entries, dict) or not all(_is_record(entry) for entry in entries.values()):
        raise BrokenCheckpoint(f"{path}: an entry lacks its size or sha256")
    for name in entries:
        if not _is_inside(name):
            raise BrokenCheckpoint(f"{path}: names a file outside the checkpoint: {name[:200]!r}")
    if content != _manifest(entries) or text != json_bytes(content):
        raise BrokenCheckpoint(f"{path}: was changed after it was written (its own digest does not match)")
    files = {name: FileRecord(**entry) for name, entry in entries.items()}
    missing = [name for name in _REQUIRED if name not in files]
    if missing:
        raise BrokenCheckpoint(f"{path}: does not list {', '.join(missing)}")
    return files


def index_folders(files: Mapping[str, FileRecord]) -> list[str]:
    """Return the names of the tensor folders of a checkpoint: "model", "optimizer", "ema" ..."""
    folders = [name.removesuffix("/index.json") for name in files if name.endswith("/index.json")]
    return [name for name in folders if "/" not in name and name != TOKENIZER]


def write_manifest(folder: Path, files: dict[str, FileRecord]) -> None:
    """Write `manifest.json` for `files`, which were written through `write_file`."""
    entries = {name: {"size": files[name].size, "sha256": files[name].sha256} for name in sorted(files)}
    write_file(folder / MANIFEST, [json_bytes(_manifest(entries))])


def write_file(path: Path, pieces: Iterable[Buffer]) -> FileRecord:
    """Write and fsync a new file, and return its record.

    Other threads run meanwhile. Another thread can stop it, see `stop_writing_when`.

    Raises:
        OSError: the disk is full or the like.
        Abandoned: this thread was told to stop.
    """
    size, digest = 0, hashlib.sha256()
    with open(path, "xb") as file:
        for piece in pieces:
            for block in _blocks(piece):
                _stop_if_told()
                file.write(block)
                digest.update(block)
                size += len(block)
                del block
            del piece  # frees the memory of a large tensor before the next one
        file.flush()
        os.fsync(file.fileno())
    return FileRecord(size, digest.hexdigest())


def _blocks(piece: Buffer) -> Iterator[memoryview]:
    whole = memoryview(piece).cast("B")
    for start in range(0, len(whole), _WRITE_BYTES):
        yield whole[start : start + _WRITE_BYTES]


class Abandoned(Exception):
    """The writing thread was told to stop."""


def stop_writing_when(stopped: Callable[[], bool]) -> None:
    """Make `write_file` in this thread raise `Abandoned` once `stopped()` is true."""
    _this_thread.stopped = stopped


_this_thread = threading.local()


def _stop_if_told() -> None:
    stopped = getattr(_this_thread, "stopped", None)
    if stopped is not None and stopped():
        raise Abandoned


def json_bytes(content: Any) -> bytes:
    """Return `content` as indented JSON in UTF-8; NaN and infinity are refused (`encoding.encode` them)."""
    return (json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _manifest(entries: dict[str, Any]) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(entries, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    return {"format": _FORMAT, "version": _VERSION, "digest": digest, "files": entries}


def _is_record(entry: Any) -> bool:
    if not isinstance(entry, dict) or entry.keys() != {"size", "sha256"} or not isinstance(entry["sha256"], str):
        return False
    return type(entry["size"]) is int and 0 <= entry["size"] < 1 << 63


def _is_inside(name: str) -> bool:
    """Whether it is a path inside the folder, valid for the system and for JSON in UTF-8."""
    plain = "\0" not in name and not any("\ud800" <= character <= "\udfff" for character in name)
    return plain and name not in ("", ".") and not Path(name).is_absolute() and ".." not in Path(name).parts
