"""Load a checkpoint: its files are checked against the manifest before anything is taken from them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.contents import config_of, trainer_state_of
from ftk.checkpoint.manifest import index_folders, read_manifest
from ftk.checkpoint.naming import model_tensors
from ftk.checkpoint.storage import StoredTensor, TensorIndex, read_index, read_tensors
from ftk.errors import UserError
from ftk.model_parallel.collective import collective
from ftk.model_parallel.world import World
from ftk.models.conversion import LazyTensors

_NAMES_SHOWN = 6


def load_model_state(
    folder: str | Path,
    model: nn.Module,
    *,
    strict: bool = True,
    ema: bool = False,
    check_hashes: bool = True,
    world: World | None = None,
) -> tuple[list[str], list[str]]:
    """Fill a model's parameters and buffers in place from a checkpoint, in the device and dtype they have.

    Sharded tensors (DTensors) take their shards, whatever shards the checkpoint was written in.

    Args:
        folder: a checkpoint, or what `resolve_checkpoint` makes one of.
        model: not on the meta device.
        strict: whether names that only one side has are an error; shapes that differ always are.
        ema: take the averaged weights of trained parameters, and the plain weights of all others.
        check_hashes: off if the checkpoint was verified just now.
        world: processes that load together, each calling this with its part of the model, from one file system: each
            checks some of the files, and what fails on one fails on all. None: this one alone.

    Returns:
        (names only the model has, names only the checkpoint has); both empty if `strict`.

    Raises:
        BrokenCheckpoint: before any weight is changed.
        UserError: names or shapes do not fit, or there are no averaged weights; before any weight is changed.
    """
    world = world or World.single()
    own = {name for names in tied_names(model).values() for name in names} | set(model_tensors(model)[0])
    known = names_anywhere(own, world)
    source = collective(world, lambda: layout.resolve_checkpoint(folder))
    check_files(source, prefix=f"{layout.MODEL}/", hashes=check_hashes, world=world)
    if ema:
        check_ema(source, check_hashes, world)
    return collective(world, lambda: _fill(source, model, known, strict=strict, ema=ema))


def _fill(folder: Path, model: nn.Module, known: set[str], *, strict: bool, ema: bool) -> tuple[list[str], list[str]]:
    """Read this process's part of a model.

    Args:
        folder: a checkpoint whose files are whole.
        model, strict, ema: as of `load_model_state`, and so is what is returned.
        known: the names of all processes' parts.
    """
    wanted, _ = model_tensors(model)
    tied = tied_names(model)
    index = read_index(folder / layout.MODEL)
    sources = _by_every_name(index)
    targets, missing = {}, []
    for name, tensor in wanted.items():
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device; materialise the model before loading")
        found = next((other for other in tied.get(name, [name]) if other in sources), None)
        if found is None:
            missing.append(name)
        else:
            targets[found] = tensor
    unexpected = sorted(name for name in index.tensors if name not in known and not _alias_in(index, name, known))
    wrong = [
        f"{name} is {list(sources[name][1].shape)} in the checkpoint, {list(tensor.shape)} in the model"
        for name, tensor in targets.items()
        if sources[name][1].shape != tuple(tensor.shape)
    ]
    for names in tied.values():
        if len({sources[name][0] for name in names if name in sources}) > 1:
            wrong.append(f"{' and '.join(names)} are one tensor in the model and not in the checkpoint")
    if wrong or (strict and (missing or unexpected)):
        raise UserError(f"{folder}: does not fit the model: {mismatch(missing, unexpected, wrong)}")
    # A tensor that the checkpoint ties and the model does not is read once and copied to its other names.
    first: dict[str, torch.Tensor] = {}
    copies = []
    for name, tensor in targets.items():
        stored_name = sources[name][0]
        if stored_name in first:
            copies.append((tensor, first[stored_name]))
        else:
            first[stored_name] = tensor
    read_tensors(folder / layout.MODEL, first)
    with torch.no_grad():
        for target, source in copies:
            target.copy_(source)
    if ema:
        by_name = {other: wanted[name] for name in wanted for other in tied.get(name, [name])}
        averaged = read_index(folder / layout.EMA).tensors
        read_tensors(folder / layout.EMA, {name: by_name[name] for name in averaged if name in by_name})
    return missing, unexpected


def load_model_tensors(folder: str | Path, *, ema: bool = False, check_hashes: bool = True) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint's model by name, on the CPU, in the dtype they are kept in.

    Tied ones are one object under each of their names, so that `save_checkpoint` ties them again.

    Args:
        folder: a checkpoint, or what `resolve_checkpoint` makes one of.
        ema: return the averaged weights in place of the trained ones they were made of.
        check_hashes: off if the checkpoint was verified just now.

    Raises:
        BrokenCheckpoint: the checkpoint is not whole.
        UserError: it has no averaged weights.
    """
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=f"{layout.MODEL}/", hashes=check_hashes)
    if ema:
        check_ema(folder, check_hashes)
    index = read_index(folder / layout.MODEL)
    tensors = {name: torch.empty(t.shape, dtype=t.dtype) for name, t in index.tensors.items()}
    read_tensors(folder / layout.MODEL, tensors)
    tensors |= {alias: tensors[name] for alias, name in index.aliases.items()}
    if ema:
        averaged = read_index(folder / layout.EMA).tensors
        read_tensors(folder / layout.EMA, {name: tensors[name] for name in averaged if name in tensors})
    return tensors


def lazy_model_tensors(folder: Path, *, ema: bool = False) -> LazyTensors:
    """The tensors of a checkpoint's model, tied ones once, each read when it is asked for.

    Args and raises: as `load_model_tensors`; `folder` is a checkpoint itself.
    """
    check_files(folder, prefix=f"{layout.MODEL}/")
    if ema:
        check_ema(folder, True)
    index = read_index(folder / layout.MODEL)
    averaged = read_index(folder / layout.EMA).tensors if ema else {}

    def read(name: str) -> torch.Tensor:
        target = torch.empty(index.tensors[name].shape, dtype=index.tensors[name].dtype)
        read_tensors(folder / (layout.EMA if name in averaged else layout.MODEL), {name: target})
        return target

    described = {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in index.tensors.items()}
    return LazyTensors(described, read)


def load_extra_tensors(
    folder: str | Path,
    name: str,
    targets: Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    check_hashes: bool = True,
    world: World | None = None,
) -> list[str]:
    """Fill tensors in place from those that `save_checkpoint` was given as `extra_tensors[name]`.

    Args:
        folder: a checkpoint, or what `resolve_checkpoint` makes one of.
        name: of the set, for example "ema".
        targets: by name, of the shapes that were saved, in any dtype and on any device.
        strict: exactly those that were saved; off: what only one side has is left alone.
        check_hashes: off if the checkpoint was verified just now.
        world: as of `load_model_state`.

    Returns:
        Names of targets that the set has not; none if `strict`.

    Raises:
        BrokenCheckpoint: before anything is changed.
        UserError: the checkpoint has no such set, or one of other names or shapes; before anything is changed.
    """
    world = world or World.single()
    source = collective(world, lambda: layout.resolve_checkpoint(folder))
    files = check_files(source, prefix=f"{name}/", hashes=check_hashes, world=world)
    if f"{name}/index.json" not in files:
        raise UserError(f"{source}: has no {name!r} tensors")
    return collective(world, lambda: _fill_extra(source, name, targets, strict=strict))


def _fill_extra(folder: Path, name: str, targets: Mapping[str, torch.Tensor], *, strict: bool) -> list[str]:
    stored = read_index(folder / name).tensors
    wrong = [
        f"{key} is {list(stored[key].shape)} in the checkpoint, {list(tensor.shape)} here"
        for key, tensor in targets.items()
        if key in stored and stored[key].shape != tuple(tensor.shape)
    ]
    missing, unexpected = sorted(targets.keys() - stored.keys()), sorted(stored.keys() - targets.keys())
    if wrong or (strict and (missing or unexpected)):
        raise UserError(f"{folder}: its {name!r} tensors do not fit: {mismatch(missing, unexpected, wrong)}")
    read_tensors(folder / name, {key: tensor for key, tensor in targets.items() if key in stored})
    return missing


def extra_tensor_names(folder: str | Path) -> list[str]:
    """Return the names of the sets of tensors that a checkpoint holds besides model and optimizer."""
    folder = layout.resolve_checkpoint(folder)
    return [name for name in index_folders(read_manifest(folder)) if name not in (layout.MODEL, layout.OPTIMIZER)]


def check_ema(folder: Path, hashes: bool, world: World | None = None) -> None:
    if f"{layout.EMA}/index.json" not in check_files(folder, prefix=f"{layout.EMA}/", hashes=hashes, world=world):
        raise UserError(
            f"{folder}: has no averaged weights (its run had no `ema_decay`); take the trained ones, without `ema`"
        )


def read_trainer_state(folder: str | Path) -> dict[str, Any]:
    """Return the `trainer_state` that the checkpoint was saved with."""
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=layout.TRAINER_STATE)
    return trainer_state_of(folder)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the resolved configuration that the checkpoint was saved with, as plain dicts."""
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=layout.CONFIG)
    return config_of(folder)


def names_anywhere(names: set[str], world: World) -> set[str]:
    """The names that any of the processes gives."""
    return {name for theirs in world.gather_json(sorted(names)) for name in theirs}


def _by_every_name(index: TensorIndex) -> dict[str, tuple[str, StoredTensor]]:
    """Return every name a model may ask for -> (the name it is kept under, what is kept)."""
    sources = {name: (name, stored) for name, stored in index.tensors.items()}
    for alias, name in index.aliases.items():
        sources[alias] = (name, index.tensors[name])
    return sources


def tied_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the first name of each tied tensor of a model -> all its names."""
    _, aliases = model_tensors(model)
    tied: dict[str, list[str]] = {}
    for alias, first in aliases.items():
        tied.setdefault(first, [first]).append(alias)
    return tied


def _alias_in(index: TensorIndex, name: str, known: set[str]) -> bool:
    return any(target == name and alias in known for alias, target in index.aliases.items())


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
