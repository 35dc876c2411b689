"""Which checkpoints of a run stay on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ftk.checkpoint import BEST, LAST, checkpoint_name, is_checkpoint
from ftk.trainer.config import CheckpointConfig


@dataclass(frozen=True)
class Standing:
    """What a run knows of its checkpoints when it has written one.

    Attributes:
        num_updates: of the one that was written.
        best: number of updates of the best validation, None before the first.
        scores: checkpoint's name -> its validation metric.
    """

    num_updates: int
    best: int | None
    scores: Mapping[str, float]


def best_of(folder: Path, standing: Standing, config: CheckpointConfig) -> Path | None:
    """The checkpoint of a run's folder that `checkpoint_best` is to mean; None: it stays as it is.

    That is the one of the best validation. Where it could not be saved, an older best one stays; where that is gone,
    the best of those that are there takes its place.
    """
    if standing.best is not None and is_checkpoint(folder / checkpoint_name(standing.best)):
        return folder / checkpoint_name(standing.best)
    if is_checkpoint(folder / BEST):
        return None
    return next((folder / name for name in _ranked(standing, config) if is_checkpoint(folder / name)), None)


def superfluous(folder: Path, present: Iterable[Path], standing: Standing, config: CheckpointConfig) -> list[Path]:
    """The checkpoints that need not stay.

    The last and the best one always do: those that the links mean, whatever state the links are in, and those that
    `standing` names.

    Args:
        folder: of the run.
        present: its `checkpoint_N`.
        standing: what the run knows of them.
        config: how many are kept.
    """
    if config.keep_last == 0:
        return []
    numbers = {path: int(path.name.rpartition("_")[2]) for path in present}
    # Those beyond the present update were there before the run went on from an older one. They are not the newest,
    # and whoever had it go on may want them: they stay until the run has come there itself.
    newest = sorted((path for path in numbers if numbers[path] <= standing.num_updates), key=numbers.__getitem__)
    kept = {path.name for path in newest[-config.keep_last :]} | {checkpoint_name(standing.num_updates)}
    kept |= {path.name for path in numbers if numbers[path] > standing.num_updates}
    kept |= {link.readlink().name for link in (folder / LAST, folder / BEST) if link.is_symlink()}
    if standing.best is not None:
        kept.add(checkpoint_name(standing.best))
    there = {path.name for path in numbers}
    kept |= set([name for name in _ranked(standing, config) if name in there][: config.keep_best])
    every = config.keep_interval_updates
    return [path for path, number in numbers.items() if path.name not in kept and not (every and number % every == 0)]


def _ranked(standing: Standing, config: CheckpointConfig) -> list[str]:
    """Names of the checkpoints with a validation, the best first."""
    return sorted(standing.scores, key=standing.scores.__getitem__, reverse=config.maximize_best_metric)
