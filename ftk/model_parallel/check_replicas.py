"""Processes hold the same values before they share them out or sum their gradients: checked, or made so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.errors import UserError
from ftk.model_parallel.materialize import named_tensors, non_persistent_buffers
from ftk.model_parallel.shards import is_distributed, local
from ftk.model_parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_replicas(model: nn.Module, world: World) -> None:
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


def check_replicas_over_mesh(model: nn.Module, mesh: DeviceMesh) -> None:
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
def copy_from_first(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all processes the values of the first one; what is on the meta device has none.

    What is cut over a dimension of the mesh already (layers of `ftk.model_parallel.tensor_parallel.layers`) is made
    equal over the others.

    Args:
        model: of plain tensors, or DTensors.
        mesh: of any dimensions, over the processes.

    Raises:
        UserError: a parameter is cut over processes that are some of those of a dimension, or more.
    """
    device = mesh_device(mesh)
    groups = [mesh.get_group(dimension) for dimension in range(mesh.ndim)]
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            continue
        own = local(tensor)
        values = own.detach().to(device)
        for group in groups:
            if not _is_cut_over(tensor, group, name):
                dist.broadcast(values, group=group, group_src=0)
        own.copy_(values)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """This process's device of those that a mesh is over."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.cuda.current_device())


def checksum(values: Tensor) -> Tensor:
    """The bits taken as whole numbers, times a weight for each place, summed modulo 2^64: int64, 0-d.

    Whole numbers give the same sum in whatever order a device adds them; other values, or the same at other places,
    give another one.
    """
    # Of 8 bytes as of 4: a difference that is a multiple of 2^52, as of 1.0 and 2.0, would leave little of a product.
    whole_number = {1: torch.uint8, 2: torch.int16}.get(values.element_size(), torch.int32)
    bits = values.detach().contiguous().view(-1).view(whole_number)  # [N]
    # Rows of a few thousand share their weights, which are soon made; their sums have weights again.
    weights = _weights(min(bits.numel(), _ROW), bits.device)
    sums = []
    for piece in bits.split(_ROWS_AT_ONCE * _ROW):
        whole = piece.numel() // _ROW * _ROW
        if whole:
            sums.append((piece[:whole].view(-1, _ROW) * weights).sum(1))
        if whole < piece.numel():
            sums.append((piece[whole:] * weights[: piece.numel() - whole]).sum(0, keepdim=True))
    if not sums:  # no numbers
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    rows = torch.cat(sums)
    return (rows * _weights(len(rows), bits.device)).sum()


_ROW = 2**14
_ROWS_AT_ONCE = 64  # 8 MB of products at a time


def _weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers in which nobody sees an order, int64 [count]: with 1, 2, 3 ... swaps would make up for one another.

    Splitmix64 of the places (Steele et al. 2014), in the wrap-around arithmetic of int64.
    """
    numbers = torch.arange(1, count + 1, device=device) * -0x61C8864680B583EB
    numbers = (numbers ^ (numbers >> 30)) * -0x40A7B892E31B1A47
    numbers = (numbers ^ (numbers >> 27)) * -0x6B2FB644ECCEEE15
    return (numbers ^ (numbers >> 31)) | 1


def _is_cut_over(tensor: Tensor, group: dist.ProcessGroup, name: str) -> bool:
    """Whether the processes of a group are those that have parts of a DTensor, and not those that have the same."""
    if not is_distributed(tensor) or all(placement.is_replicate() for placement in tensor.placements):  # type: ignore
        return False
    holders: set[int] = set(tensor.device_mesh.mesh.flatten().tolist())  # type: ignore[attr-defined]
    members = set(dist.get_process_group_ranks(group))
    if len(both := holders & members) == 1:
        return False
    if both != members or both != holders:
        raise UserError(
            f"{name} lies on the processes {sorted(holders)} already, which are neither those of one dimension of the "
            f"mesh nor apart from them; give the mesh that the model's own layers were given a dimension of"
        )
    return True


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
