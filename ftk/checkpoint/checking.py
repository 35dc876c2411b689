"""Checks of a checkpoint against its manifest. Each rank reads a part of the files, and all get all problems."""

from __future__ import annotations

import heapq
import logging
import os
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from ftk.checkpoint.contents import content_problems
from ftk.checkpoint.layout import CONFIG, MODEL, OPTIMIZER, TRAINER_STATE, BrokenCheckpoint, numbered_checkpoints
from ftk.checkpoint.manifest import FileRecord, read_manifest
from ftk.errors import UserError
from ftk.files import sha256_of
from ftk.model_parallel.collective import collective, on_main
from ftk.model_parallel.world import World

logger = logging.getLogger(__name__)

_MISSING = "missing"
_PROBLEMS_SHOWN = 6


def verify(folder: str | Path, *, world: World | None = None) -> list[str]:
    """Check every file of a checkpoint against its manifest, and the contents of configuration, state and indices.

    Args:
        world: ranks that all call this, and each check a part; None: this process alone.

    Returns:
        One line for each problem, beginning with the file's name; none if the checkpoint is whole. The same on every
        rank.
    """
    folder = Path(folder)
    try:
        files = collective(world or World.single(), lambda: read_manifest(folder))
    except UserError as error:
        return [str(error).removeprefix(f"{folder}{os.sep}")]
    problems = find_problems(folder, files, world=world)
    hurt = {Path(problem.partition(": ")[0]).parent for problem in problems}
    whole = [name for name in files if Path(name).parent not in hurt]
    problems += on_main(world or World.single(), lambda: content_problems(folder, whole))
    return sorted(problems)


def check_files(
    folder: Path, *, prefix: str = "", hashes: bool = True, world: World | None = None
) -> dict[str, FileRecord]:
    """Check the sizes of all files, and the hashes of those whose name starts with `prefix`.

    With the model's files, the contents of the configuration and the trainer's state are checked too.

    Args:
        prefix: for example "model/": the files about to be read.
        hashes: whether to check hashes; off if they were checked before.
        world: as of `verify`.

    Returns:
        The manifest, by file name relative to `folder`, with "/" between parts.

    Raises:
        BrokenCheckpoint: names each problem.
    """
    files = collective(world or World.single(), lambda: read_manifest(folder))
    problems = find_problems(folder, files, contents=lambda name: hashes and name.startswith(prefix), world=world)
    if not problems and prefix == f"{MODEL}/":  # refused also when only weights are read
        problems = on_main(world or World.single(), lambda: content_problems(folder, (CONFIG, TRAINER_STATE)))
    if problems:
        is_copy = all(problem.startswith(f"{OPTIMIZER}/") for problem in problems)
        hint = " (`ftk-checkpoint export` makes a copy that has no optimizer)" if is_copy else ""
        raise BrokenCheckpoint(f"{folder}: is incomplete or damaged: {some_problems(problems)}{hint}")
    return files


def find_problems(
    folder: Path,
    files: dict[str, FileRecord],
    contents: Callable[[str], bool] = lambda name: True,
    *,
    world: World | None = None,
) -> list[str]:
    """Compare files with their records: sizes on every rank, contents on one of them.

    Args:
        files: by name.
        contents: whether to hash the file of this name.
        world: as of `verify`.
    """
    world = world or World.single()
    share = _share(((name, record.size) for name, record in files.items() if contents(name)), world)

    def look() -> dict[str, str]:
        found = {}
        for name, record in files.items():
            problem = _size_problem(folder / name, record)
            if problem is None and name in share:
                problem = _content_problem(folder / name, record)
            if problem is not None:
                found[name] = problem
        return found

    problems: dict[str, str] = {}
    for rank, theirs in enumerate(world.gather_json(collective(world, look))):
        for name, problem in theirs.items():
            here_only = rank > 0 and problem == _MISSING  # the main rank sees it: machines do not share the folder
            problems.setdefault(name, f"{problem} for rank {rank}" if here_only else problem)
    return [f"{name}: {problems[name]}" for name in sorted(problems)]


def some_problems(problems: list[str]) -> str:
    """The first problems, in one line."""
    more = [f"and {len(problems) - _PROBLEMS_SHOWN} more"] if len(problems) > _PROBLEMS_SHOWN else []
    return "; ".join(problems[:_PROBLEMS_SHOWN] + more)


def newest_whole_checkpoint(
    run_folder: str | Path, *, world: World | None = None, check: Callable[[Path], list[str]] | None = None
) -> Path | None:
    """Return the newest `checkpoint_N` of a run that is whole; the problems of newer ones are logged.

    All files of checked checkpoints are hashed, so `check_hashes=False` may be given to load one.

    Args:
        world: as of `verify`.
        check: returns the problems of a checkpoint, the same on every rank; None: `verify`.

    Returns:
        None if the run has no checkpoint.

    Raises:
        BrokenCheckpoint: the run has checkpoints and none is whole; a new start would hide that.
    """
    run_folder = Path(run_folder)
    names = on_main(world or World.single(), lambda: [path.name for path in numbered_checkpoints(run_folder)])
    for name in names:
        candidate = run_folder / name
        problems = check(candidate) if check is not None else verify(candidate, world=world)
        if not problems:
            if name != names[0]:
                logger.warning("continuing from %s, the newest whole checkpoint", candidate)
            return candidate.resolve()
        logger.warning("%s: is incomplete or damaged: %s", candidate, some_problems(problems))
    if names:
        what, them = f"none of its {len(names)} checkpoints is", "them"
        if len(names) == 1:
            what, them = f"its checkpoint {names[0]} is not", "it"
        raise BrokenCheckpoint(
            f"{run_folder}: {what} whole (see ftk-checkpoint verify); move {them} away to start over"
        )
    return None


def _share(sizes: Iterable[tuple[str, int]], world: World) -> set[str]:
    """The files that this rank hashes: from the largest on, each is assigned to the rank with the fewest bytes."""
    reading = [(0, rank) for rank in range(world.size)]  # a heap of (bytes, rank)
    share = set()
    for name, size in sorted(sizes, key=lambda entry: (-entry[1], entry[0])):
        so_far, rank = reading[0]
        heapq.heapreplace(reading, (so_far + size, rank))
        if rank == world.rank:
            share.add(name)
    return share


def _size_problem(path: Path, record: FileRecord) -> str | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return _MISSING
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if not stat.S_ISREG(status.st_mode):
        return "is no regular file"
    size = status.st_size
    if size == 0 and record.size:
        return f"empty; {record.size} bytes were written"
    if size != record.size:
        return f"has {size} bytes; {record.size} were written"
    return None


def _content_problem(path: Path, record: FileRecord) -> str | None:
    try:
        content = sha256_of(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return None if content == record.sha256 else "content differs from what was written (sha256)"
