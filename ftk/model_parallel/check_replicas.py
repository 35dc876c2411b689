"""Checks, or makes sure, that all processes hold the same values before sharding or data parallel training."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.materialize import named_tensors, non_persistent_buffers
from ftk.model_parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_replicas(model: nn.Module, world: World) -> None:
    """Refuse a model that differs between processes: training would silently produce nonsense.

    Processes exchange a digest of each parameter and buffer, on the host. Stages of a pipeline hold different
    parameters; those that more than one process has must be the same. Tensors on the meta device and scratch buffers,
    which are in no checkpoint, are not compared.

    Args:
        model: as this process has built it; of plain tensors.
        world: all of its processes must call this.

    Raises:
        UserError: on all of them, with the name of the first parameter or buffer that differs.
    """
    if world.mesh is None:
        return
    scratch = non_persistent_buffers(model)
    own = {
        name: f"{value.dtype} {list(value.shape)} {_digest(value)}"
        for name, value in named_tensors(model)
        if not value.is_meta and name not in scratch
    }
    gathered = world.gather_json(own)
    known: dict[str, str] = {}
    for values in gathered:
        for name, digest in values.items():
            if known.setdefault(name, digest) != digest:
                raise _difference(name)
        if world.sizes.pipeline == 1 and (alone := sorted(values.keys() ^ gathered[0].keys())):
            raise _difference(alone[0])


@torch.no_grad()
def copy_from_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all processes the values of the first one; what is on the meta device has none.

    Args:
        model: of plain tensors.
        mesh: of any dimensions, over the processes.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            values = tensor.detach().to(mesh_device(mesh))
            for dimension in range(mesh.ndim):
                dist.broadcast(values, group=mesh.get_group(dimension), group_src=0)
            tensor.copy_(values)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This process's device in a mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())


def _digest(value: Tensor) -> str:
    numbers = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(numbers.numpy().data).hexdigest()[:16]


def _difference(name: str) -> UserError:
    return UserError(
        f"{name} differs between processes; build the same model on all of them, with one seed (torch.manual_seed) or "
        f"from one checkpoint"
    )
