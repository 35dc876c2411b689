"""The files of a tokenizer: finding them, reading them, hashing them, and the folder that keeps them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ftk.errors import UserError, download_hint, naming_place
from ftk.files import read_bytes, reason, write_whole
from ftk.parsing import parse_json

MAX_IDS = 10**7
"""Ids that files give to single tokens are below; arrays have a place for each id."""
DESCRIPTION, TEMPLATE = "ftk_tokenizer.json", "chat_template.jinja"
FORMAT = 1

_MAX_BYTES = 1 << 28  # the largest vocabularies have some ten million


@dataclass(frozen=True)
class VocabularyFile:
    """A file of a tokenizer as it was when it was read; some are kept without deciding ids."""

    path: Path
    sha256: str
    num_bytes: int
    decides_ids: bool = True


def read_file(path: Path) -> tuple[bytes, VocabularyFile]:
    """The content of a file, and its name, hash and size.

    Raises:
        UserError: there is no such file, it is no regular one, is larger than a vocabulary, or cannot be read.
    """
    try:
        content = read_bytes(path, _MAX_BYTES)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file{download_hint(str(path), 'model')}") from None
    except IsADirectoryError:
        raise UserError(f"{path}: is a directory; give a file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({reason(error)})") from error
    return content, VocabularyFile(path, hashlib.sha256(content).hexdigest(), len(content))


def as_text(content: bytes, path: Path) -> str:
    """`content` as UTF-8 without a byte order mark.

    Raises:
        UserError: it is not UTF-8; names the first bad byte.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: byte {error.start} is not UTF-8, as a vocabulary must be") from None


def read_template(vocabulary: Path) -> tuple[str | None, tuple[VocabularyFile, ...]]:
    """The chat template beside a vocabulary, and its file; None: there is none.

    Raises:
        UserError: it is not UTF-8.
    """
    path = vocabulary.with_name(TEMPLATE)
    if not path.is_file():
        return None, ()
    content, file = read_file(path)
    return as_text(content, path), (dataclasses.replace(file, decides_ids=False),)


def lines_of(text: str) -> list[str]:
    """The lines of a text, of which the last may end in a line end or not."""
    return text.removesuffix("\n").split("\n") if text else []


def find_file(path: Path, suffix: str, what: str) -> Path:
    """`path` itself if it is a file; in a folder, the one file whose name ends in `suffix`.

    Raises:
        UserError: there is none, or there are several.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file or folder; give {what}{download_hint(str(path), 'model')}")
    if not path.is_dir():
        return path
    candidates = sorted(entry for entry in path.iterdir() if entry.name.endswith(suffix))
    return single_file(path, candidates, f"*{suffix}", what)


def single_file(folder: Path, candidates: Sequence[Path], pattern: str, what: str) -> Path:
    """The one candidate among the files of a folder that fit a pattern.

    Raises:
        UserError: there is not exactly one.
    """
    if not candidates:
        inside = folder / "tokenizer"  # of a data folder or a checkpoint
        raise UserError(f"{folder}: holds no file {pattern}; give {inside if inside.is_dir() else what}")
    if len(candidates) > 1:
        names = ", ".join(candidate.name for candidate in candidates)
        raise UserError(
            f"{folder}: holds {len(candidates)} files {pattern} ({names}); "
            f"give one of them instead of the folder, e.g. {candidates[0]}"
        )
    return candidates[0]


def save_files(folder: Path, files: Sequence[VocabularyFile], description: dict[str, Any]) -> None:
    """Copy the very files into `folder` and describe them in `ftk_tokenizer.json`, which is written last.

    Raises:
        UserError: a file changed since it was read, so that the copy would not be the tokenizer in memory.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        content, now = read_file(file.path)
        if now.sha256 != file.sha256:
            raise UserError(f"{file.path}: changed on disk since the tokenizer was built; build it again")
        target = folder / file.path.name
        if not (target.exists() and os.path.samefile(target, file.path)):
            write_whole(target, content)
    deciding = [file for file in files if file.decides_ids]  # the others may be replaced by hand
    listed = [{"name": file.path.name, "sha256": file.sha256, "bytes": file.num_bytes} for file in deciding]
    text = json.dumps({"format": FORMAT, **description, "files": listed}, indent=2, ensure_ascii=False) + "\n"
    write_whole(folder / DESCRIPTION, text)


def find_description(folder: str | os.PathLike[str]) -> Path:
    """The `ftk_tokenizer.json` of a tokenizer folder, or of `tokenizer/` inside a checkpoint or data folder.

    Raises:
        UserError: there is none.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(
            f"{folder}: {'is a file, not a folder' if folder.exists() else 'no such folder'}; "
            "give a checkpoint, a data folder or a tokenizer folder"
        )
    for candidate in (folder / DESCRIPTION, folder / "tokenizer" / DESCRIPTION):
        if candidate.is_file():
            return candidate
    raise UserError(f"{folder}: holds no tokenizer (neither {DESCRIPTION} nor tokenizer/{DESCRIPTION})")


def read_description(path: Path) -> dict[str, Any]:
    """The description of a saved tokenizer, with its files checked against their hashes.

    Raises:
        UserError: it is not a description, or a file is missing or is not the one that was saved.
    """
    content, _ = read_file(path)
    with naming_place(path, ValueError):
        description = parse_json(as_text(content, path))
    kinds = {"format": int, "name": str, "options": dict, "files": list}
    whole = isinstance(description, dict) and all(isinstance(description.get(k), t) for k, t in kinds.items())
    if not whole:
        raise UserError(f"{path}: not a tokenizer description; it must hold {', '.join(kinds)}")
    if description["format"] != FORMAT:
        raise UserError(f"{path}: format {description['format']}, this ftk reads format {FORMAT}")
    for listed in description["files"]:
        _check_listed(path, listed)
    return description


def _check_listed(path: Path, listed: Any) -> None:
    name = listed.get("name") if isinstance(listed, dict) else None
    if not isinstance(name, str) or name != Path(name).name or name in ("", ".", "..") or "\0" in name:
        raise UserError(f"{path}: a file is listed as {listed!r}; it must be a plain name in the same folder")
    _, file = read_file(path.parent / name)
    if file.sha256 != listed.get("sha256"):
        raise UserError(
            f"{file.path}: is not the file that was saved (sha256 {file.sha256[:12]}..., "
            f"{path.name} says {str(listed.get('sha256'))[:12]}...); use an undamaged copy"
        )
