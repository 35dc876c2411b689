"""Where a checkpoint's parts lie, how checkpoints of a run are named, and which one a path means."""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from ftk.errors import UserError

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
TOKENIZER = "tokenizer"
MODEL = "model"
OPTIMIZER = "optimizer"
EMA = "ema"  # exponential moving average of the trained parameters, by their names
TRAINER_STATE = "trainer.json"
MANIFEST = "manifest.json"

LAST = "checkpoint_last"
BEST = "checkpoint_best"

TEMPORARY = ".tmp"
REPLACED = ".replaced.tmp"

_NUMBERED = re.compile(r"checkpoint_(\d+)")


class BrokenCheckpoint(UserError):
    """A checkpoint is not what was written: a file is missing, cut or changed."""


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
    """Tell whether `folder` is meant as a checkpoint; whether it is whole, `verify` says."""
    return (folder / MANIFEST).is_file()


def is_remains(folder: Path) -> bool:
    """Tell whether `folder` looks like a checkpoint that lost its manifest."""
    return not is_checkpoint(folder) and (folder / MODEL).is_dir()


def resolve_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint folder that `path` means.

    Args:
        path: a checkpoint folder, a link to one, or a run's folder, which means its `checkpoint_best`,
            else its `checkpoint_last`, else its newest `checkpoint_N`.

    Returns:
        The real folder: links are followed once, here, so that a link moved meanwhile changes nothing.

    Raises:
        UserError: nothing there is a checkpoint.
        BrokenCheckpoint: it is one without its manifest.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path.resolve()
    if not path.exists():
        what = "a link to a folder that is gone" if path.is_symlink() else "no such folder"
        raise UserError(f"{path}: {what}; a checkpoint folder or a run's folder is meant here")
    if not path.is_dir():
        raise UserError(f"{path}: is a file; a checkpoint is a folder (with {MANIFEST} in it)")
    for candidate in [path / BEST, path / LAST, *numbered_checkpoints(path)]:
        if is_checkpoint(candidate):
            return candidate.resolve()
    if (path / "latest_checkpointed_iteration.txt").is_file() or any(path.glob("mp_rank_*_model_states.pt")):
        raise UserError(
            f"{path}: is a checkpoint of the original GLM; make an ftk checkpoint of it with"
            f" ftk-checkpoint convert --from glm {path} DST"
        )
    if is_remains(path):
        raise BrokenCheckpoint(f"{path}: has no {MANIFEST}; it is not a whole checkpoint")
    raise UserError(f"{path}: holds no checkpoint (no {MANIFEST}, no {LAST}, no {checkpoint_name(0)[:-1]}N)")


def point_to(run_folder: str | Path, name: str, folder: str | Path) -> None:
    """Make `run_folder/name` a relative link to `folder`, replacing an older link in one step.

    Args:
        run_folder: folder of the run.
        name: `checkpoint_last` or `checkpoint_best`.
        folder: the checkpoint; it lies under `run_folder`.
    """
    run_folder, folder = Path(run_folder), Path(folder)
    link = run_folder / name
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link}: is not a link; move it away, ftk keeps a link of this name")
    target = os.path.relpath(folder.resolve(), run_folder.resolve())
    temporary = run_folder / (name + TEMPORARY)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target, target_is_directory=True)
    os.replace(temporary, link)
    sync_folder(run_folder)


def put_in_place(temporary: Path, folder: Path) -> None:
    """Give the finished folder `temporary` its final name, replacing an older checkpoint of that name.

    The older one steps aside first and is removed last, so that at every moment one of the two is on disk;
    `clean_leftovers` brings it back if the process dies in between.
    """
    replaced = folder.with_name(folder.name + REPLACED)
    if replaced.exists():
        shutil.rmtree(replaced)
    if folder.exists():
        os.rename(folder, replaced)
    os.rename(temporary, folder)
    sync_folder(folder.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def remove_checkpoint(folder: str | Path) -> None:
    """Remove a checkpoint; killed half-way it leaves only a name that nobody takes for a checkpoint."""
    folder = Path(folder)
    doomed = folder.with_name(folder.name + TEMPORARY)
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(folder, doomed)
    shutil.rmtree(doomed)


def clean_leftovers(run_folder: str | Path) -> list[Path]:
    """Remove what killed processes left half-written in a run's folder; return what was removed.

    Call it before a run starts to save. Only `checkpoint_*.tmp` is touched.
    """
    removed = []
    run_folder = Path(run_folder)
    for leftover in sorted(run_folder.glob("checkpoint_*" + TEMPORARY)) if run_folder.is_dir() else []:
        if leftover.name.endswith(REPLACED):
            original = leftover.with_name(leftover.name[: -len(REPLACED)])
            if not original.exists():
                os.rename(leftover, original)
                logger.warning("%s: brought back; a save that was to replace it was killed", original)
                continue
        if leftover.is_symlink():
            leftover.unlink()
        else:
            shutil.rmtree(leftover)
        removed.append(leftover)
        logger.info("%s: removed, left by a killed process", leftover)
    return removed


def sync_folder(folder: Path) -> None:
    """Have the names in `folder` reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
