"""Names of a checkpoint's parts and of a run's checkpoints, and the checkpoint that a path refers to."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from ftk.config.choice import choice
from ftk.errors import UserError, download_hint
from ftk.files import reason, remove_leftovers, sync_folder, temporary_folder
from ftk.registry import CONVERTERS

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
SOURCE = "source"  # small files of another program, next to its weights
MODEL = "model"
OPTIMIZER = "optimizer"
EMA = "ema"  # exponential moving average of the trained parameters, by their names
TRAINER_STATE = "trainer.json"
MANIFEST = "manifest.json"
ADAPTER = "adapter"  # in peft's form, also a section of config.yaml
ADAPTER_CONFIG = "adapter_config.json"
HEAD = "head"  # section of config.yaml

LAST = "checkpoint_last"
BEST = "checkpoint_best"

TEMPORARY = ".tmp-"  # in the temporary names that `ftk.files` gives

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class BrokenCheckpoint(UserError):
    """A checkpoint is damaged: a file is missing, truncated or changed."""


def checkpoint_name(num_updates: int) -> str:
    """Return the folder name of the checkpoint made after `num_updates` updates."""
    return f"checkpoint_{num_updates}"


def numbered_checkpoints(run_folder: Path) -> list[Path]:
    """Return the folders `checkpoint_N` of a run, the highest N first, whole or not."""
    found = []
    if run_folder.is_dir():
        for entry in run_folder.iterdir():
            match = _NUMBERED.fullmatch(entry.name)
            if match and entry.is_dir():
                found.append((int(match[1]), entry))
    return [path for _, path in sorted(found, reverse=True)]


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` is a checkpoint; `verify` checks whether it is complete."""
    return (folder / MANIFEST).is_file()


def is_adapter(folder: Path) -> bool:
    """Whether `folder` holds an adapter alone, as ftk or peft writes it."""
    return (folder / ADAPTER_CONFIG).is_file()


def has_adapter_files(folder: Path) -> bool:
    """Whether `folder` holds an adapter alone, or a part of one."""
    return is_adapter(folder) or any((folder / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin"))


def is_remains(folder: Path) -> bool:
    """Whether `folder` looks like a checkpoint without its manifest."""
    return not is_checkpoint(folder) and (folder / MODEL).is_dir()


def form_of(folder: Path) -> str | None:
    """The registered form of another program's folder that is opened as it is; None if it is none, or ftk's own."""
    if is_checkpoint(folder):
        return None
    return next((name for name, form in _forms_of(folder) if hasattr(form, "describe")), None)


def resolve_model(path: str | Path) -> Path:
    """As `resolve_checkpoint`, for what only reads a model: also a folder of another program, opened as it is."""
    path = Path(path)
    return path.resolve() if _holds_no_checkpoint(path) and form_of(path) is not None else resolve_checkpoint(path)


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint folder that `path` refers to.

    Args:
        path: a checkpoint folder, a link to one, or a run's folder; of a run it is `checkpoint_best`, else
            `checkpoint_last`, else the newest `checkpoint_N`.

    Returns:
        The folder without links, so that it stays the same if a link is moved later.

    Raises:
        UserError: there is no checkpoint.
        BrokenCheckpoint: the checkpoint has no manifest.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path.resolve()
    if not path.exists():
        what = "a link to a folder that is gone" if path.is_symlink() else "no such folder"
        hint = download_hint(str(path), "model")
        raise UserError(f"{path}: {what}; give a checkpoint folder or a run's folder{hint}")
    if not path.is_dir():
        raise UserError(f"{path}: is a file; a checkpoint is a folder (with {MANIFEST} in it)")
    for candidate in _candidates(path):
        if is_checkpoint(candidate):
            return candidate.resolve()
        if is_remains(candidate):
            raise BrokenCheckpoint(f"{candidate}: has no {MANIFEST}; it is incomplete, name another checkpoint")
    if has_adapter_files(path):
        raise UserError(f"{path}: is an adapter without its model; `base` names the folder of that")
    for name, _ in _forms_of(path):
        raise UserError(
            f"{path}: is a checkpoint of another program; make an ftk checkpoint of it with"
            f" ftk-checkpoint convert --from {name} {path} DST"
        )
    if is_remains(path):
        raise BrokenCheckpoint(f"{path}: has no {MANIFEST}; it is not a whole checkpoint")
    raise UserError(f"{path}: holds no checkpoint (no {MANIFEST}, no {LAST}, no {checkpoint_name(0)[:-1]}N)")


def _candidates(folder: Path) -> list[Path]:
    """Where the checkpoint of a run may be, the one to take first."""
    return [folder / BEST, folder / LAST, *numbered_checkpoints(folder)]


def _holds_no_checkpoint(folder: Path) -> bool:
    return not any(is_checkpoint(place) or is_remains(place) for place in [folder, *_candidates(folder)])


def _forms_of(folder: Path) -> Iterator[tuple[str, Any]]:
    """The registered forms of other programs that a folder has, by name, with their default options."""
    for name in CONVERTERS:
        form = choice(name, CONVERTERS, name).build()
        if form.recognises(folder):
            yield name, form


def point_to(run_folder: str | Path, name: str, folder: str | Path) -> None:
    """Make `run_folder/name` a relative link to `folder`, replacing an older link atomically.

    Args:
        name: `checkpoint_last` or `checkpoint_best`.
        folder: the checkpoint; it lies under `run_folder`.
    """
    run_folder, folder = Path(run_folder), Path(folder)
    link = run_folder / name
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link}: is not a link; move it away, ftk needs a link of this name")
    target = os.path.relpath(folder.resolve(), run_folder.resolve())
    with temporary_folder(link) as place:
        (place / name).symlink_to(target, target_is_directory=True)
        os.replace(place / name, link)
    sync_folder(run_folder)


def remove_checkpoint(folder: str | Path) -> None:
    """Remove a checkpoint; if killed meanwhile, it leaves only a temporary name."""
    folder = Path(folder)
    with temporary_folder(folder) as place:  # removed with its content
        os.rename(folder, place / folder.name)


def clean_leftovers(run_folder: str | Path) -> list[Path]:
    """Remove incomplete files and folders that killed processes left in a run's folder; return their paths.

    Call it before a run starts to save. Only `checkpoint_*.tmp-*` is removed, unless a running process writes it.
    """
    run_folder = Path(run_folder)
    if not run_folder.is_dir():
        return []
    found = run_folder.glob(f"checkpoint_*{TEMPORARY}*")
    removed: list[Path] = []
    for name in sorted({path.name.partition(TEMPORARY)[0] for path in found}):
        removed += remove_leftovers(run_folder / name)
    for leftover in removed:
        logger.info("%s: removed, left by a killed process", leftover)
    return removed


T = TypeVar("T")


def read_part(path: Path, read: Callable[[Path], T]) -> T:
    """Read a file of a checkpoint.

    Args:
        read: raises an `OSError` or a `ValueError` for a bad file, as the readers of `ftk.files` do.

    Raises:
        BrokenCheckpoint: `read` failed; names the file.
    """
    try:
        return read(path)
    except OSError as error:
        raise BrokenCheckpoint(f"{path}: cannot be read ({reason(error)})") from error
    except ValueError as error:
        raise BrokenCheckpoint(f"{path}: {error}") from error
