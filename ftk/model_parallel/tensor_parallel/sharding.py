"""From whole parameters to parts on each process, as DTensors, and back."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ftk.model_parallel.tensor_parallel.functions import part_size


def distributed_parameter(whole: nn.Parameter, mesh: DeviceMesh, dim: int | None, fused: int = 1) -> nn.Parameter:
    """The parameter as a DTensor on a one-dimensional mesh; nothing is communicated.

    Args:
        whole: the same on every process, or on the meta device.
        mesh: over the processes.
        dim: along which each process gets a part; None: all of it.
        fused: so many layers of one shape lie in `whole` behind each other along `dim`, each of which is cut
            (`ftk.model_parallel.shards.Fused`).
    """
    values = whole.detach()
    placement: Placement = Replicate()
    if dim is None:
        local = values.contiguous()
    else:
        local = own_chunk(values.unflatten(dim, (fused, -1)), mesh, dim + 1).flatten(dim, dim + 1)
        placement = Shard(dim)
    distributed = as_dtensor(local, mesh, placement, values.shape)
    return nn.Parameter(distributed, requires_grad=whole.requires_grad)


def own_chunk(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This process's part along `dim`, cut as `torch.chunk` cuts: a copy, so that the whole can be freed."""
    length, size = whole.size(dim), part_size(whole.size(dim), mesh.size())
    start = min(mesh.get_local_rank() * size, length)
    return whole.narrow(dim, start, min(size, length - start)).clone(memory_format=torch.contiguous_format)


def as_dtensor(local: Tensor, mesh: DeviceMesh, placement: Placement, shape: torch.Size) -> DTensor:
    """A DTensor of which this process holds `local`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=stride)


def whole_value(parameter: Tensor) -> Tensor:
    """The whole of a parameter or gradient, detached, on every process; of a DTensor all its processes must ask."""
    value = parameter.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value
