"""Load a checkpoint: its files are checked against the manifest before they are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.contents import config_of, trainer_state_of
from ftk.checkpoint.index import read_index
from ftk.checkpoint.manifest import index_folders, read_manifest
from ftk.checkpoint.naming import model_tensors
from ftk.checkpoint.reading import read_tensors, read_whole
from ftk.checkpoint.weights import Weights, finite, foreign_config, weights_of
from ftk.errors import UserError
from ftk.model_parallel.collective import collective
from ftk.model_parallel.world import World
from ftk.models.renames import LazyTensors

_NAMES_SHOWN = 6


def load_model_state(
    folder: str | Path,
    model: nn.Module,
    *,
    ema: bool = False,
    check_hashes: bool = True,
    world: World | None = None,
    weights: Weights | None = None,
) -> None:
    """Fill a model's parameters and buffers in place from a checkpoint, in the device and dtype they have.

    Sharded tensors (DTensors) take their shards, whatever shards the checkpoint was written in.

    Args:
        folder: a checkpoint, another program's folder, or a path that `resolve_model` accepts.
        model: not on the meta device.
        ema: load the averaged weights of trained parameters, and the plain weights of all others.
        check_hashes: off if the checkpoint was verified just now.
        world: ranks that load at the same time from one file system, each with its part of the model: each checks
            some of the files, and a failure on one fails on all. None: this process alone.
        weights: those of the folder, where they have been opened already.

    Raises:
        BrokenCheckpoint: before any weight is changed.
        UserError: names or shapes do not fit, or there are no averaged weights; before any weight is changed.
    """
    world = world or World.single()
    source, known = find_weights(folder, model, ema=ema, check_hashes=check_hashes, world=world)
    collective(world, lambda: _fill(source, weights or weights_of(source), model, known, ema=ema))


def find_weights(
    path: str | Path, model: nn.Module, *, ema: bool = False, check_hashes: bool = True, world: World
) -> tuple[Path, set[str]]:
    """Check the files of a checkpoint's weights; another program's are checked when they are opened.

    Args:
        path, model, ema, check_hashes, world: as of `load_model_state`.

    Returns:
        The checkpoint's folder; and the names, on all ranks, of the model's tensors.
    """
    known = names_on_all_ranks({name for names in names_of_tensors(model).values() for name in names}, world)
    source = collective(world, lambda: layout.resolve_model(path))
    if layout.is_checkpoint(source):
        check_files(source, prefix=f"{layout.MODEL}/", hashes=check_hashes, world=world)
    if ema:
        check_ema(source, check_hashes, world)
    return source, known


def _fill(folder: Path, weights: Weights, model: nn.Module, known: set[str], *, ema: bool) -> None:
    """Read this rank's part of a model.

    Args:
        folder: a checkpoint whose files are whole, or another program's folder.
        weights: those of the folder.
        model, ema: as of `load_model_state`.
        known: the names of all ranks' parts.
    """
    wanted, _ = model_tensors(model)
    for name, tensor in wanted.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; materialise the model before loading")
    sources, *misfit = find_sources(weights.tensors, weights.names, model, known)
    if any(misfit):
        raise UserError(f"{folder}: does not fit the model: {mismatch(*misfit)}")
    averaged = read_index(folder / layout.EMA).tensors if ema else {}
    read_named(weights.fill, wanted, {name: kept for name, kept in sources.items() if kept not in averaged})
    if ema:
        averages = partial(read_tensors, folder / layout.EMA)
        read_named(averages, wanted, {name: kept for name, kept in sources.items() if kept in averaged})


def find_sources(
    tensors: Mapping[str, Any], stored_names: Mapping[str, str], model: nn.Module, known: set[str]
) -> tuple[dict[str, str], list[str], list[str], list[str]]:
    """Where a model's tensors are stored.

    Args:
        tensors, stored_names: of a checkpoint, as of `Weights`.
        known: the names of all ranks' parts.

    Returns:
        Name in the model -> the name it is stored under; and what does not fit: tensors that are missing, those that
        the model does not have, and those of another shape.
    """
    wanted, _ = model_tensors(model)
    sources: dict[str, str] = {}
    missing, wrong = [], []
    for name, names in names_of_tensors(model).items():
        found = [other for other in names if other in stored_names]
        if not found:
            missing.append(name)
            continue
        sources[name] = stored_names[found[0]]
        stored, shape = tuple(tensors[sources[name]].shape), tuple(wanted[name].shape)
        if stored != shape:
            wrong.append(f"{found[0]} is {list(stored)} in the checkpoint, {list(shape)} in the model")
        if len({stored_names[other] for other in found}) > 1:
            wrong.append(f"{' and '.join(names)} are one tensor in the model and not in the checkpoint")
    present = {stored_names[name] for name in known & stored_names.keys()}
    return sources, missing, sorted(tensors.keys() - present), wrong


def read_named(
    fill: Callable[[Mapping[str, torch.Tensor]], None], targets: Mapping[str, torch.Tensor], sources: Mapping[str, str]
) -> None:
    """Fill `targets[name]` with the tensor that is stored as `sources[name]`, for each name in `sources`."""
    left = dict(sources)
    while left:  # one turn, unless the checkpoint ties tensors that are not tied here
        turn = {stored: name for name, stored in reversed(left.items())}
        fill({stored: targets[name] for stored, name in turn.items()})
        left = {name: stored for name, stored in left.items() if turn[stored] != name}


def load_model_tensors(folder: str | Path, *, ema: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's model by name, on the CPU, in the stored dtype.

    Tied tensors are one object under several names, so that `save_checkpoint` ties them again.

    Args:
        folder: a checkpoint, or a path that `resolve_checkpoint` accepts.
        ema: return the averaged weights of the trained parameters.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole.
        UserError: it has no averaged weights.
    """
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=f"{layout.MODEL}/")
    if ema:
        check_ema(folder)
    index = read_index(folder / layout.MODEL)
    tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in index.tensors.items()}
    read_tensors(folder / layout.MODEL, tensors)
    tensors |= {alias: tensors[name] for alias, name in index.aliases.items()}
    if ema:
        averaged = read_index(folder / layout.EMA).tensors
        read_tensors(folder / layout.EMA, {name: tensors[name] for name in averaged if name in tensors})
    return tensors


def lazy_model_tensors(folder: Path, *, ema: bool = False) -> LazyTensors:
    """The tensors of a checkpoint's model, tied ones once, each read on demand.

    Args and raises: as `load_model_tensors`, and a `UserError` when a tensor that is not finite is read; `folder` is a
    checkpoint itself.
    """
    check_files(folder, prefix=f"{layout.MODEL}/")
    if ema:
        check_ema(folder)
    index = read_index(folder / layout.MODEL)
    averaged = read_index(folder / layout.EMA).tensors if ema else {}

    def read(name: str) -> torch.Tensor:
        if name in averaged:
            tensor = torch.empty(index.tensors[name].shape, dtype=index.tensors[name].dtype)
            read_tensors(folder / layout.EMA, {name: tensor})
            return tensor
        # The same, without an index that is read again for each tensor.
        return read_whole(folder / layout.MODEL, index.tensors[name])

    described = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in index.tensors.items()}
    return finite(LazyTensors(described, read), folder)


def load_extra_tensors(
    folder: str | Path, name: str, targets: Mapping[str, torch.Tensor], *, world: World | None = None
) -> list[str]:
    """Fill tensors in place from those that `save_checkpoint` was given as `extra_tensors[name]`.

    Names that only one side has are left alone.

    Args:
        folder: a checkpoint, or a path that `resolve_checkpoint` accepts.
        name: of the set, for example "ema".
        targets: by name, of the shapes that were saved, in any dtype and on any device.
        world: as of `load_model_state`.

    Returns:
        Names of targets that the set lacks.

    Raises:
        BrokenCheckpoint: before anything is changed.
        UserError: the checkpoint has no such set, or one with other shapes; before anything is changed.
    """
    world = world or World.single()
    source = collective(world, lambda: layout.resolve_checkpoint(folder))
    if f"{name}/index.json" not in check_files(source, prefix=f"{name}/", world=world):
        raise UserError(f"{source}: has no {name!r} tensors")
    return collective(world, lambda: _fill_extra(source, name, targets))


def _fill_extra(folder: Path, name: str, targets: Mapping[str, torch.Tensor]) -> list[str]:
    stored = read_index(folder / name).tensors
    wrong = [
        f"{key} is {list(stored[key].shape)} in the checkpoint, {list(tensor.shape)} here"
        for key, tensor in targets.items()
        if key in stored and stored[key].shape != tuple(tensor.shape)
    ]
    if wrong:
        raise UserError(f"{folder}: its {name!r} tensors do not fit: {some_names(wrong)}")
    read_tensors(folder / name, {key: tensor for key, tensor in targets.items() if key in stored})
    return sorted(targets.keys() - stored.keys())


def extra_tensor_names(folder: str | Path) -> list[str]:
    """Return the names of the sets of tensors in a checkpoint besides model and optimizer."""
    folder = layout.resolve_checkpoint(folder)
    return [name for name in index_folders(read_manifest(folder)) if name not in (layout.MODEL, layout.OPTIMIZER)]


def check_ema(folder: Path, hashes: bool = True, world: World | None = None) -> None:
    prefix = f"{layout.EMA}/"
    files = check_files(folder, prefix=prefix, hashes=hashes, world=world) if layout.is_checkpoint(folder) else ()
    if f"{prefix}index.json" not in files:
        raise UserError(
            f"{folder}: has no averaged weights (its run had no `ema_decay`); load the trained ones, without `ema`"
        )


def read_trainer_state(folder: str | Path) -> dict[str, Any]:
    """Return the `trainer_state` of a checkpoint; of another program's folder nothing."""
    folder = layout.resolve_model(folder)
    if not layout.is_checkpoint(folder):
        return {}
    check_files(folder, prefix=layout.TRAINER_STATE)
    return trainer_state_of(folder)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the configuration of a checkpoint, or what that of another program's folder would be, as plain dicts."""
    folder = layout.resolve_model(folder)
    if not layout.is_checkpoint(folder):
        return foreign_config(folder)
    check_files(folder, prefix=layout.CONFIG)
    return config_of(folder)


def names_on_all_ranks(names: set[str], world: World) -> set[str]:
    """The union of the names that the ranks give."""
    return {name for theirs in world.gather_json(sorted(names)) for name in theirs}


def names_of_tensors(model: nn.Module) -> dict[str, list[str]]:
    """Return the first name of each tensor of a model -> all its names, in order."""
    tensors, aliases = model_tensors(model)
    names = {name: [name] for name in tensors}
    for alias, first in aliases.items():
        names[first].append(alias)
    return names


def mismatch(missing: list[str], unexpected: list[str], wrong: list[str]) -> str:
    parts = []
    if missing:
        parts.append(f"missing in the checkpoint: {some_names(missing)}")
    if unexpected:
        parts.append(f"unexpected in the checkpoint: {some_names(unexpected)}")
    if wrong:
        parts.append(some_names(wrong))
    return "; ".join(parts)


def some_names(names: list[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    return shown if len(names) <= _NAMES_SHOWN else f"{shown} and {len(names) - _NAMES_SHOWN} more"
