"""Save a checkpoint: written under a temporary name, synced to the disk file by file, then renamed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ftk import files
from ftk.checkpoint import layout
from ftk.checkpoint.manifest import FileRecord, write_file, write_manifest
from ftk.checkpoint.shared import check_shared
from ftk.checkpoint.snapshot import Snapshot, take_snapshot
from ftk.checkpoint.storage import write_tensors
from ftk.errors import UserError
from ftk.model_parallel.collective import on_main
from ftk.model_parallel.world import World

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20


def save_checkpoint(folder: str | Path, *, overwrite: bool = True, **contents: Any) -> Path:
    """Write a checkpoint folder that needs nothing else, complete or not at all.

    Args:
        folder: its name, `RUN/checkpoint_N`; parents are made.
        overwrite: replace a checkpoint of this name; it stays until the new one is complete.
        contents: as of `take_snapshot`.

    Returns:
        `folder`.

    Raises:
        UserError: `folder` exists and is no checkpoint, or `overwrite` is off.
        OSError: the disk is full or the like; nothing is left of the attempt, older checkpoints stay.
    """
    refuse_to_replace(Path(folder), overwrite=overwrite)
    return write_snapshot(folder, take_snapshot(**contents), overwrite=overwrite)


def write_snapshot(
    folder: str | Path, snapshot: Snapshot, *, overwrite: bool = True, world: World | None = None
) -> Path:
    """Write a snapshot, as `save_checkpoint` does. May run in a thread of its own.

    Args:
        world: ranks that each write their shards into a file system that all of them see; with a host group that is
            used for nothing else at that time (`World.with_own_host_group`). None: this process alone.
    """
    folder = Path(folder)
    world = world or World.single()
    stack = contextlib.ExitStack()

    def begin() -> str:
        refuse_to_replace(folder, overwrite=overwrite)
        folder.parent.mkdir(parents=True, exist_ok=True)
        return str(stack.enter_context(files.temporary_folder(folder)))

    def finish() -> int:
        """Write the files of the main rank and rename the folder; returns the number of bytes."""
        for name, source in snapshot.folders.items():
            records.update(_copy_folder(source, temporary, name))
        for name, content in ((layout.CONFIG, snapshot.config), (layout.TRAINER_STATE, snapshot.trainer_state)):
            records[name] = write_file(temporary / name, [content])
        made = {} if snapshot.adapter_files is None else snapshot.adapter_files(temporary)
        for name, content in made.items():
            path = temporary / layout.ADAPTER / name
            path.parent.mkdir(exist_ok=True)
            records[f"{layout.ADAPTER}/{name}"] = write_file(path, [content])
        write_manifest(temporary, records)
        files.sync_tree(temporary)
        files.put_in_place(temporary, folder)
        return sum(record.size for record in records.values())

    try:
        with stack:  # removes the temporary folder if this fails
            temporary = Path(on_main(world, begin))
            check_shared(temporary, world)
            records = _write_tensors(temporary, snapshot, world)
            size = on_main(world, finish)
    except OSError as error:
        raise OSError(
            error.errno, f"saving the checkpoint failed ({files.reason(error)}); nothing of it was kept", str(folder)
        ) from error
    if world.is_main:
        logger.info("saved %s (%.1f MB, %d files)", folder, size / 1e6, len(records) + 1)
    return folder


def _write_tensors(folder: Path, snapshot: Snapshot, world: World) -> dict[str, FileRecord]:
    """Write the folders of tensors; return the records of their files by name, on the main rank those of all ranks."""
    records: dict[str, FileRecord] = {}
    for part, content in snapshot.parts.items():
        written = write_tensors(
            folder / part,
            content.tensors,
            extra=content.extra,
            read=content.read,
            process_group=world.own_host_group,
        )
        records.update({f"{part}/{name}": record for name, record in written.items()})
    return records


def refuse_to_replace(folder: Path, *, overwrite: bool) -> None:
    """Raise a UserError if a checkpoint must not be written to `folder`."""
    if not (folder.exists() or folder.is_symlink()):
        return
    if not overwrite:
        raise UserError(f"{folder}: exists; replace it with `overwrite` or choose another name")
    if folder.is_symlink():
        raise UserError(f"{folder}: is a link; give the name of the folder it is to replace")
    if layout.is_checkpoint(folder) or layout.is_remains(folder):
        return
    if not folder.is_dir() or any(folder.iterdir()):
        raise UserError(f"{folder}: exists and is no checkpoint; it is not replaced")


def _copy_folder(source: Path, folder: Path, name: str) -> dict[str, FileRecord]:
    """Copy the files under `source` to `folder/name`, sync and hash them."""
    if not source.is_dir():
        raise UserError(f"{source}: no such folder; expected one for {name}/")
    records = {}
    for path in sorted(source.rglob("*")):
        if path.is_file():
            relative = f"{name}/{path.relative_to(source).as_posix()}"
            target = folder / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            records[relative] = write_file(target, _blocks(path))
    if not records:
        raise UserError(f"{source}: is empty; expected a folder for {name}/")
    return records


def _blocks(path: Path) -> Iterator[bytes]:
    with files.open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
