"""Load an optimizer's state: matched by parameter names, on the devices where the optimizer expects it."""

from __future__ import annotations

import math
from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ftk.checkpoint import layout
from ftk.checkpoint.checking import check_files
from ftk.checkpoint.encoding import decode
from ftk.checkpoint.index import INDEX, StoredTensor, TensorIndex, read_index
from ftk.checkpoint.load import mismatch, names_on_all_ranks
from ftk.checkpoint.naming import parameter_names
from ftk.checkpoint.reading import read_tensors
from ftk.errors import UserError
from ftk.model_parallel.collective import collective
from ftk.model_parallel.shards import Fused, fused_parameters, is_distributed, local_ranges, with_fused
from ftk.model_parallel.world import World

# Entries of a parameter group that only select a kernel are not loaded.
_KERNEL_CHOICES = ("foreach", "fused", "capturable", "differentiable")


def load_optimizer_state(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    check_hashes: bool = True,
    world: World | None = None,
) -> None:
    """Load the state and the hyperparameters of an optimizer, bit for bit.

    Args:
        folder: a checkpoint, or a path that `resolve_checkpoint` accepts.
        model: its parameters are the optimizer's, matched by name.
        optimizer: of the same class; parameters in one group must have had the same hyperparameters.
        check_hashes: off if the checkpoint was verified just now.
        world: as of `load_model_state`.

    Raises:
        BrokenCheckpoint: before anything is changed.
        UserError: the checkpoint has no optimizer, or one with other parameters or groups.
    """
    world = world or World.single()
    names = parameter_names(model)
    held = names_on_all_ranks({names[id(p)] for group in optimizer.param_groups for p in group["params"]}, world)
    source = collective(world, lambda: layout.resolve_checkpoint(folder))
    files = check_files(source, prefix=f"{layout.OPTIMIZER}/", hashes=check_hashes, world=world)
    if f"{layout.OPTIMIZER}/index.json" not in files:
        raise UserError(f"{source}: has no optimizer state; only its weights can be loaded")
    fused = fused_parameters(model)
    collective(world, lambda: _fill(source, optimizer, names, fused, held))


def _fill(
    folder: Path, optimizer: torch.optim.Optimizer, names: dict[int, str], fused: dict[int, Fused], held: set[str]
) -> None:
    """Read this rank's part of the state.

    Args:
        folder: a checkpoint whose files are whole.
        optimizer: of this rank's part of the model.
        names: `id` -> name of its parameters.
        fused: `id` -> layers of the parameters with fused layers.
        held: names of the parameters of all ranks.
    """
    index = read_index(folder / layout.OPTIMIZER)
    stored_groups, scalars = groups_and_scalars(folder, index)
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
        empty, layers = _empty_state(parameter, group, entry, stored), fused.get(id(parameter))
        targets[path] = with_fused(empty, layers and layers.of_state(empty, parameter))
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


def _match_groups(
    folder: Path,
    stored_groups: list[dict[str, Any]],
    optimizer: torch.optim.Optimizer,
    names: dict[int, str],
    held: set[str],
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Pair the stored hyperparameters of its parameters with each group of the optimizer.

    The grouping may differ: each stage of a pipeline has its own groups.
    """
    members = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    options = {
        name: {key: value for key, value in group.items() if key != "params" and key not in _KERNEL_CHOICES}
        for group in stored_groups
        for name in group["params"]
    }
    if held != options.keys():
        difference = mismatch(sorted(held - options.keys()), sorted(options.keys() - held), [])
        raise UserError(f"{folder}: its optimizer has other parameters: {difference}; only its weights can be loaded")
    pairs = []
    for group, group_names in zip(optimizer.param_groups, members, strict=True):
        moved = next((name for name in group_names if options[name] != options[group_names[0]]), None)
        if moved is not None:
            raise UserError(
                f"{folder}: its optimizer groups the parameters differently (for example {moved});"
                " only its weights can be loaded"
            )
        taken = options[group_names[0]] if group_names else {}
        for key, value in taken.items():
            if key in group and not _is_alike(value, group[key]):
                raise layout.BrokenCheckpoint(f"{folder}: its optimizer has {value!r:.40} for {key}")
        pairs.append((taken, group))
    return pairs


def groups_and_scalars(folder: Path, index: TensorIndex) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The parameter groups of a checkpoint's optimizer, and "PARAMETER/ENTRY" -> value of its state without tensors.

    Args:
        index: of its optimizer.

    Raises:
        BrokenCheckpoint: they do not have the form that ftk writes, or belong to parameters of no group.
    """

    def read(_: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        groups, scalars = decode(index.extra.get("param_groups")), decode(index.extra.get("scalars"))
        if not isinstance(groups, list) or not all(map(_is_group, groups)) or not isinstance(scalars, dict):
            raise ValueError("has no parameter groups and scalars")
        names = {name for group in groups for name in group["params"]}
        for path in (*index.tensors, *scalars):
            _owner_and_entry(path, names)
        return groups, scalars

    return layout.read_part(folder / layout.OPTIMIZER / INDEX, read)


def _is_group(group: Any) -> bool:
    names = group.get("params") if isinstance(group, dict) else None
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _owner_and_entry(path: str, parameters: Set[str]) -> tuple[str, str]:
    """Split "PARAMETER/ENTRY"; either part may contain "/". Raises a ValueError if it starts with no parameter."""
    at = path.find("/")
    while at >= 0 and path[:at] not in parameters:
        at = path.find("/", at + 1)
    if at < 0:
        raise ValueError(f"holds {path!r:.200}, which belongs to no parameter in its groups")
    return path[:at], path[at + 1 :]


def _empty_state(parameter: torch.Tensor, group: dict[str, Any], entry: str, stored: StoredTensor) -> torch.Tensor:
    """Return an empty tensor for a state entry, on the device where the optimizer expects it."""
    if stored.shape == tuple(parameter.shape) and entry != "step":
        return torch.empty_like(parameter, dtype=stored.dtype, requires_grad=False)
    if is_distributed(parameter) and stored.shape:
        return _empty_statistics(parameter, stored)
    # As in torch.optim, a step count is on the parameter's device only if a kernel reads it there.
    on_device = entry != "step" or group.get("fused") or group.get("capturable")
    return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device if on_device else "cpu")


def _empty_statistics(parameter: Any, stored: StoredTensor) -> torch.Tensor:
    """For statistics of rows or columns of a DTensor: sharded as it in dimensions of its size, else replicated."""
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    shape = torch.Size(stored.shape)
    full = [len(shape) == parameter.ndim and shape[dim] == size for dim, size in enumerate(parameter.shape)]
    placements = tuple(
        placement if not placement.is_replicate() and full[placement.dim] else Replicate()  # type: ignore[attr-defined]
        for placement in parameter.placements
    )
    mesh = parameter.device_mesh
    spec = DTensorSpec(
        mesh, placements, tensor_meta=TensorMeta(shape, torch.empty(shape, device="meta").stride(), stored.dtype)
    )
    own_shape = [place.stop - place.start for place in local_ranges(shape, mesh, placements)]
    part = torch.empty(own_shape, dtype=stored.dtype, device=parameter.to_local().device)
    # `from_local` would move the state of an offloaded parameter to the mesh's device; the constructor does not.
    return DTensor(part, spec, requires_grad=False)


def _put(state: dict[str, Any], entry: str, value: Any) -> None:
    *parents, last = entry.split("/")
    for parent in parents:
        state = state.setdefault(parent, {})
        if not isinstance(state, dict):
            raise layout.BrokenCheckpoint(f"the optimizer's state has {entry!r:.200} within a value")
    state[last] = value


def _is_alike(stored: Any, own: Any) -> bool:
    """Whether a stored hyperparameter may replace another: a finite number a number, and so on."""
    if isinstance(own, (tuple, list)) and isinstance(stored, (tuple, list)):
        return len(own) == len(stored) and all(map(_is_alike, stored, own))
    if isinstance(own, bool) or isinstance(stored, bool) or stored is None or own is None:
        return stored is None or own is None or type(stored) is type(own)
    if isinstance(own, (int, float, torch.Tensor)) and isinstance(stored, (int, float, torch.Tensor)):
        return math.isfinite(stored)
    return type(stored) is type(own)
