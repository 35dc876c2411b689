"""Which files the names that a user gives stand for, and how each is divided into documents, by its name."""

from __future__ import annotations

import fnmatch
import glob
import logging
import os
from collections import Counter
from pathlib import Path

from ftk.errors import UserError, counted, download_hint

logger = logging.getLogger(__name__)

SEPARATORS = ("line", "blank-line", "file")
FORMATS = ("auto", "text", "jsonl")
ROWS = "rows"
"""The kind of files that are tables: a document is what a row holds in one column."""
TABLE_SUFFIXES = (".parquet", ".arrow")
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
TEXT_SUFFIXES = (".txt", ".text", *JSON_SUFFIXES)
_COMPRESSED_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
_NO_DOCUMENTS = ("state.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "cache-*.arrow")
"""Files that the library `datasets` writes beside its data, or makes of it."""


def expand_paths(files: str, separator: str = "line", format: str = "auto") -> list[str]:
    """The files that a comma-separated list of files, folders and patterns (`*`, `?`, `[...]`, `**`) names.

    A folder stands for the files in it and below it whose names end as those of text, JSONL or tables do, or for all of
    them with separator "file" or a `format` other than "auto"; a pattern for the files that it matches. They come in
    the order of their names; hidden ones, and what the library `datasets` notes beside its data, are left out.

    Raises:
        UserError: a file is missing, or a folder or pattern stands for none.
    """
    paths: list[str] = []
    for name in filter(None, (part.strip() for part in files.split(","))):
        if os.path.isdir(name):
            paths += _files_in(name, any_name=separator == "file" or format != "auto")
        elif os.path.exists(name):  # unlike Path.exists, not an error where the name is too long
            paths.append(name)
        elif glob.has_magic(name):
            matches = [path for path in sorted(glob.glob(name, recursive=True)) if os.path.isfile(path)]
            matches = [path for path in matches if not _is_note(os.path.basename(path))]
            if not matches:
                raise UserError(f"{name}: no file matches this pattern (hidden files never do)")
            _log_read_files(name, matches, [])
            paths += matches
        else:
            raise UserError(f"{name}: no such file or folder{download_hint(name, 'dataset')}")
    if not paths:
        raise UserError(f"{files!r} names no file")
    return paths


def _files_in(folder: str, *, any_name: bool) -> list[str]:
    taken: list[str] = []
    left: list[str] = []
    for path in sorted(Path(folder).rglob("*"), key=str):
        name, hidden = path.name, any(part.startswith(".") for part in path.relative_to(folder).parts)
        if hidden or not path.is_file():
            continue
        stem = name[: -len(suffix)] if (suffix := compressed_suffix(name)) else name
        is_text = stem.lower().endswith(TEXT_SUFFIXES) or name.lower().endswith(TABLE_SUFFIXES)
        (taken if (any_name or is_text) and not _is_note(name) else left).append(str(path))
    if not taken:
        ends = ", ".join((*TEXT_SUFFIXES, *TABLE_SUFFIXES))
        raise UserError(
            f"{folder}: no file to read ({counted(len(left), 'other file')}); names must end in {ends} (after text "
            "and JSONL also .gz, .bz2, .xz or .zst); name other files by a pattern (*)"
        )
    _log_read_files(folder, taken, left)
    return taken


def _is_note(name: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in _NO_DOCUMENTS)


def _log_read_files(name: str, taken: list[str], left: list[str]) -> None:
    """Logs which files a folder or a pattern stands for, by the ends of their names."""
    ends = Counter("".join(Path(path).suffixes[-1 - bool(compressed_suffix(path)) :]) or "no ending" for path in taken)
    kinds = ", ".join(f"{count:,} {end}" for end, count in sorted(ends.items()))
    others = ", ".join(map(os.path.basename, left[:3])) + (" ..." if len(left) > 3 else "")
    not_taken = f"; {counted(len(left), 'other', ',')} not taken ({others})" if left else ""
    logger.info(
        "%s: reading %s (%s), the first %s%s", name, counted(len(taken), "file", ","), kinds, taken[0], not_taken
    )


def kind_of(path: str, format: str = "auto", separator: str = "line") -> str:
    """How a file is divided into documents: "jsonl" or `ROWS` by format or name, else by the separator."""
    if format == "auto" and path.lower().endswith(TABLE_SUFFIXES):
        return ROWS
    stem = path[: -len(suffix)] if (suffix := compressed_suffix(path)) else path
    if format == "jsonl" or (format == "auto" and stem.lower().endswith(JSON_SUFFIXES)):
        return "jsonl"
    return separator


def compressed_suffix(path: str) -> str:
    """ ".gz", ".bz2", ".xz" or ".zst" if the name ends so, else ""."""
    suffix = os.path.splitext(path)[1].lower()
    return suffix if suffix in _COMPRESSED_SUFFIXES else ""


def compressed_names(path: str) -> list[str]:
    """The path itself, and with each ending of compressed files."""
    return [path, *(path + suffix for suffix in _COMPRESSED_SUFFIXES)]
