"""Processes hold the same values before they share them out or sum their gradients: checked, or made so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.materialize import named_tensors, non_persistent_buffers
from ftk.model_parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_equal(model: nn.Module, world: World) -> None:
    """Refuse a model that processes have built unlike: they would train nonsense without a word.

    A few dozen bytes for each parameter and buffer are told, on the host. Stages of a pipeline hold different
    parameters; those that several processes have must be the same. What is on the meta device is not looked at.

    Args:
        model: as this process has built it; of plain tensors.
        world: whose processes all check at once.

    Raises:
        UserError: on all of them, with the name of a parameter or buffer.
    """
    if world.mesh is None:
        return
    own = {name: [int(checksum(value)), str(value.dtype), *value.shape] for name, value in _values(model)}
    told = world.gather_json(own)
    known: dict[str, list[int | str]] = {}
    for values in told:
        for name, value in values.items():
            if known.setdefault(name, value) != value:
                raise _difference(name)
        if world.sizes.pipeline == 1 and (alone := sorted(values.keys() ^ told[0].keys())):
            raise _difference(alone[0])


def check_equal_over_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
    """The same over the processes of a mesh of one dimension, whose parameters have the same names.

    Args:
        model: as this process has built it.
        mesh: over the processes.

    Raises:
        UserError: on all of them, with the name of a parameter.
    """
    values = [(name, value) for name, value in _values(model) if isinstance(value, nn.Parameter)]
    if not values:
        return
    # A process group of GPUs alone takes nothing from the host, where a model often still is.
    sums = torch.stack([checksum(value) for _, value in values]).to(mesh_device(mesh))
    gathered = [torch.empty_like(sums) for _ in range(mesh.size())]
    dist.all_gather(gathered, sums, group=mesh.get_group())
    for other in gathered:
        different = (other != sums).nonzero()
        if len(different):
            raise _difference(values[int(different[0])][0])


@torch.no_grad()
def make_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all processes the values of the first one; what is on the meta device has none.

    Args:
        model: of plain tensors.
        mesh: of any dimensions, over the processes.
    """
    device = mesh_device(mesh)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            continue
        values = tensor.detach().to(device)
        for dimension in range(mesh.ndim):
            dist.broadcast(values, group=mesh.get_group(dimension), group_src=0)
        tensor.copy_(values)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This process's device of those that a mesh is over."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())


def checksum(values: Tensor) -> Tensor:
    """The sum of the bits taken as whole numbers, 0-d: in whatever order it is made, it is the same."""
    whole_number = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(values.element_size(), torch.uint8)
    return values.detach().contiguous().view(-1).view(whole_number).sum(dtype=torch.int64)


def _values(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Plain tensors with memory; scratch buffers, which are in no checkpoint, may differ."""
    scratch = non_persistent_buffers(model)
    for name, value in named_tensors(model):
        if type(value.data) is Tensor and not value.is_meta and name not in scratch:
            yield name, value


def _difference(name: str) -> UserError:
    return UserError(
        f"{name} differs from process to process; build the model alike on all of them, with one seed "
        f"(torch.manual_seed) or from one checkpoint"
    )
