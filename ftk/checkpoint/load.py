"""Load a checkpoint: its files are checked against the manifest before anything is taken from them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ftk.checkpoint import layout
from ftk.checkpoint.encoding import decode
from ftk.checkpoint.layout import BrokenCheckpoint
from ftk.checkpoint.manifest import check_files, index_folders, read_manifest, verify
from ftk.checkpoint.naming import model_tensors, parameter_names
from ftk.checkpoint.storage import StoredTensor, TensorIndex, read_index, read_tensors
from ftk.errors import UserError
from ftk.model_parallel.world import World

logger = logging.getLogger(__name__)

# Entries of a parameter group that choose a kernel, not a result: the running optimizer keeps its own.
_KERNEL_CHOICES = ("foreach", "fused", "capturable", "differentiable")
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
        ema: take the averaged weights where there are such (of trained parameters), and the trained ones elsewhere.
        check_hashes: off if the checkpoint was verified just now.
        world: processes that load together, each its part of the model (a pipeline); None: this one alone.

    Returns:
        (names only the model has, names only the checkpoint has); both empty if `strict`.

    Raises:
        BrokenCheckpoint: before any weight is changed.
        UserError: names or shapes do not fit, or there are no averaged weights; before any weight is changed.
    """
    wanted, _ = model_tensors(model)
    tied = tied_names(model)
    known = {name for names in tied.values() for name in names} | set(wanted)
    known = names_anywhere(known, world)
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=f"{layout.MODEL}/", hashes=check_hashes)
    if ema:
        check_ema(folder, check_hashes)
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
        raise UserError(f"{folder}: does not fit the model: {_mismatch(missing, unexpected, wrong)}")
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
    tensors |= {alias: tensors[name] for alias, name in index.extra["aliases"].items()}
    if ema:
        averaged = read_index(folder / layout.EMA).tensors
        read_tensors(folder / layout.EMA, {name: tensors[name] for name in averaged if name in tensors})
    return tensors


def load_extra_tensors(
    folder: str | Path,
    name: str,
    targets: Mapping[str, torch.Tensor],
    *,
    strict: bool = True,
    check_hashes: bool = True,
) -> list[str]:
    """Fill tensors in place from those that `save_checkpoint` was given as `extra_tensors[name]`.

    Args:
        folder: a checkpoint, or what `resolve_checkpoint` makes one of.
        name: of the set, for example "ema".
        targets: by name, of the shapes that were saved, in any dtype and on any device.
        strict: exactly those that were saved; off: what only one side has is left alone.
        check_hashes: off if the checkpoint was verified just now.

    Returns:
        Names of targets that the set has not; none if `strict`.

    Raises:
        BrokenCheckpoint: before anything is changed.
        UserError: the checkpoint has no such set, or one of other names or shapes; before anything is changed.
    """
    folder = layout.resolve_checkpoint(folder)
    files = check_files(folder, prefix=f"{name}/", hashes=check_hashes)
    if f"{name}/index.json" not in files:
        raise UserError(f"{folder}: has no {name!r} tensors")
    stored = read_index(folder / name).tensors
    wrong = [
        f"{key} is {list(stored[key].shape)} in the checkpoint, {list(tensor.shape)} here"
        for key, tensor in targets.items()
        if key in stored and stored[key].shape != tuple(tensor.shape)
    ]
    missing, unexpected = sorted(targets.keys() - stored.keys()), sorted(stored.keys() - targets.keys())
    if wrong or (strict and (missing or unexpected)):
        raise UserError(f"{folder}: its {name!r} tensors do not fit: {_mismatch(missing, unexpected, wrong)}")
    read_tensors(folder / name, {key: tensor for key, tensor in targets.items() if key in stored})
    return missing


def extra_tensor_names(folder: str | Path) -> list[str]:
    """Return the names of the sets of tensors that a checkpoint holds besides model and optimizer."""
    folder = layout.resolve_checkpoint(folder)
    return [name for name in index_folders(read_manifest(folder)) if name not in (layout.MODEL, layout.OPTIMIZER)]


def check_ema(folder: Path, hashes: bool) -> None:
    if f"{layout.EMA}/index.json" not in check_files(folder, prefix=f"{layout.EMA}/", hashes=hashes):
        raise UserError(
            f"{folder}: has no averaged weights (its run had no --ema-decay); take the trained ones, without --ema"
        )


def load_optimizer_state(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    check_hashes: bool = True,
    world: World | None = None,
) -> None:
    """Give an optimizer the state and the hyperparameters of a checkpoint, bit for bit.

    Args:
        folder: a checkpoint, or what `resolve_checkpoint` makes one of.
        model: whose parameters the optimizer holds; they are matched by name.
        optimizer: of the same kind; parameters of one of its groups had the same hyperparameters.
        check_hashes: off if the checkpoint was verified just now.
        world: as of `load_model_state`.

    Raises:
        BrokenCheckpoint: before anything is changed.
        UserError: the checkpoint has no optimizer, or one with other parameters or groups.
    """
    names = parameter_names(model)
    held = names_anywhere({names[id(p)] for group in optimizer.param_groups for p in group["params"]}, world)
    folder = layout.resolve_checkpoint(folder)
    files = check_files(folder, prefix=f"{layout.OPTIMIZER}/", hashes=check_hashes)
    if f"{layout.OPTIMIZER}/index.json" not in files:
        raise UserError(f"{folder}: has no optimizer state; weights alone can be taken from it")
    index = read_index(folder / layout.OPTIMIZER)
    stored_groups, scalars = decode(index.extra["param_groups"]), decode(index.extra["scalars"])
    pairs = _match_groups(folder, stored_groups, optimizer, names, held)

    parameters = {names[id(p)]: (p, group) for _, group in pairs for p in group["params"]}
    elsewhere = {name for group in stored_groups for name in group["params"]} - parameters.keys()  # other stages
    state: dict[Any, dict[str, Any]] = {}
    targets = {}
    for path, stored in index.tensors.items():
        owner, entry = _owner_and_entry(path, parameters.keys() | elsewhere)
        if owner in elsewhere:
            continue
        parameter, group = parameters[owner]
        targets[path] = _empty_state(parameter, group, entry, stored)
        _put(state.setdefault(parameter, {}), entry, targets[path])
    for path, value in scalars.items():
        owner, entry = _owner_and_entry(path, parameters.keys() | elsewhere)
        if owner in elsewhere:
            continue
        _put(state.setdefault(parameters[owner][0], {}), entry, value)
    read_tensors(folder / layout.OPTIMIZER, targets)
    optimizer.state.clear()
    optimizer.state.update(state)
    for stored_group, group in pairs:
        group.update(stored_group)


def read_trainer_state(folder: str | Path) -> dict[str, Any]:
    """Return the `trainer_state` that the checkpoint was saved with."""
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=layout.TRAINER_STATE)
    state = decode(json.loads((folder / layout.TRAINER_STATE).read_bytes()))
    assert isinstance(state, dict)
    return state


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the resolved configuration that the checkpoint was saved with, as plain dicts."""
    folder = layout.resolve_checkpoint(folder)
    check_files(folder, prefix=layout.CONFIG)
    config = yaml.safe_load((folder / layout.CONFIG).read_bytes())
    if not isinstance(config, dict):
        raise BrokenCheckpoint(f"{folder / layout.CONFIG}: is not a mapping")
    return config


def newest_whole_checkpoint(run_folder: str | Path) -> Path | None:
    """Return the newest `checkpoint_N` of a run that is whole; broken newer ones are logged, with why.

    Every file of the ones looked at is hashed, so that loading it may pass `check_hashes=False`.

    Returns:
        None if the run has no checkpoint.

    Raises:
        BrokenCheckpoint: the run has checkpoints and none is whole: to begin anew would hide that.
    """
    candidates = layout.numbered_checkpoints(Path(run_folder))
    for candidate in candidates:
        problems = verify(candidate)
        if not problems:
            if candidate != candidates[0]:
                logger.warning("continuing from %s, the newest whole checkpoint", candidate)
            return candidate.resolve()
        logger.warning("%s: is not whole: %s", candidate, "; ".join(problems))
    if candidates:
        raise BrokenCheckpoint(
            f"{run_folder}: none of its {len(candidates)} checkpoints is whole (see ftk-checkpoint verify);"
            " move them away to begin anew"
        )
    return None


def names_anywhere(names: set[str], world: World | None) -> set[str]:
    """The names that any of the processes gives.

    It stands before everything that can fail on one process alone, so that none waits here for one that has failed.
    """
    return {name for theirs in (world or World.single()).gather_json(sorted(names)) for name in theirs}


def _by_every_name(index: TensorIndex) -> dict[str, tuple[str, StoredTensor]]:
    """Return every name a model may ask for -> (the name it is kept under, what is kept)."""
    sources = {name: (name, stored) for name, stored in index.tensors.items()}
    for alias, name in index.extra["aliases"].items():
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
    return any(target == name and alias in known for alias, target in index.extra["aliases"].items())


def _mismatch(missing: list[str], unexpected: list[str], wrong: list[str]) -> str:
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


def _match_groups(
    folder: Path,
    stored_groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    held: set[str],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair each of the optimizer's groups with the hyperparameters that its members had.

    How the parameters were grouped may differ: stages of a pipeline have groups of their own. `held` are the names of
    the parameters of all stages.
    """
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    options = {
        name: {key: value for key, value in group.items() if key != "params" and key not in _KERNEL_CHOICES}
        for group in stored_groups
        for name in group["params"]
    }
    if held != options.keys():
        difference = _mismatch(sorted(held - options.keys()), sorted(options.keys() - held), [])
        raise UserError(
            f"{folder}: its optimizer has other parameters: {difference}; only the weights can be taken from it"
        )
    pairs = []
    for group, group_names in zip(optimizer.param_groups, members, strict=True):
        moved = next((name for name in group_names if options[name] != options[group_names[0]]), None)
        if moved is not None:
            raise UserError(
                f"{folder}: its optimizer groups the parameters otherwise (for example {moved});"
                " only the weights can be taken from it"
            )
        pairs.append((options[group_names[0]] if group_names else {}, group))
    return pairs


def _owner_and_entry(path: str, parameters: Set[str]) -> tuple[str, str]:
    """Split "PARAMETER/ENTRY"; either part may hold a "/" of its own."""
    at = path.find("/")
    while path[:at] not in parameters:
        at = path.index("/", at + 1)
    return path[:at], path[at + 1 :]


def _empty_state(parameter: torch.Tensor, group: dict[str, Any], entry: str, stored: StoredTensor) -> torch.Tensor:
    """Return a tensor to read a state entry into, placed as the optimizer would place it."""
    if stored.shape == tuple(parameter.shape) and entry != "step":
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    if isinstance(parameter, DTensor) and stored.shape:
        return _empty_statistics(parameter, stored)
    # As torch.optim does: a step count lives beside its parameter only where a kernel reads it there.
    on_device = entry != "step" or group.get("fused") or group.get("capturable")
    return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device if on_device else "cpu")


def _empty_statistics(parameter: DTensor, stored: StoredTensor) -> DTensor:
    """Of rows or columns: cut as the parameter is along the dimensions that they have in full, whole along others."""
    shape = torch.Size(stored.shape)
    full = [len(shape) == parameter.ndim and shape[dim] == size for dim, size in enumerate(parameter.shape)]
    placements = tuple(
        placement if not placement.is_replicate() and full[placement.dim] else Replicate()  # type: ignore[attr-defined]
        for placement in parameter.placements
    )
    mesh = parameter.device_mesh
    own_shape, _ = compute_local_shape_and_global_offset(shape, mesh, placements)
    part = torch.empty(own_shape, dtype=stored.dtype, device=parameter.to_local().device)
    meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), stored.dtype)
    # By the constructor: `from_local` would take the state of an offloaded parameter to the mesh's device.
    return DTensor(part, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def _put(state: dict[str, Any], entry: str, value: Any) -> None:
    *parents, last = entry.split("/")
    for parent in parents:
        state = state.setdefault(parent, {})
    state[last] = value
