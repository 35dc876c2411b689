"""From whole parameters to parts on each process, as DTensors, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ftk.model_parallel.shards import as_dtensor, own_pieces, with_fused
from ftk.model_parallel.tensor_parallel.functions import part_size


def distributed_parameter(whole: nn.Parameter, mesh: DeviceMesh, dim: int | None, fused: int = 1) -> nn.Parameter:
    """The parameter as a DTensor on a one-dimensional mesh; nothing is communicated.

    Args:
        whole: the same on every process, or on the meta device.
        mesh: over the processes.
        dim: along which each process gets a part; None: all of it.
        fused: the number of equal layers concatenated in `whole` along `dim`, each of which is cut
            (`ftk.model_parallel.shards.Fused`).
    """
    values = whole.detach()
    placement: Placement = Replicate()
    if dim is None:
        local = values.contiguous()
    else:
        local = own_chunk(values.unflatten(dim, (fused, -1)), mesh, dim + 1).flatten(dim, dim + 1)
        placement = Shard(dim)
    stride = torch.empty(values.shape, device="meta").stride()
    made = DTensor.from_local(local, mesh, [placement], run_check=False, shape=values.shape, stride=stride)
    return nn.Parameter(made, requires_grad=whole.requires_grad)


def own_chunk(whole: Tensor, mesh: DeviceMesh, dim: int) -> Tensor:
    """This process's part along `dim`, cut as `torch.chunk` cuts: a copy, so that the whole can be freed."""
    length, size = whole.size(dim), part_size(whole.size(dim), mesh.size())
    start = min(mesh.get_local_rank() * size, length)
    return whole.narrow(dim, start, min(size, length - start)).clone(memory_format=torch.contiguous_format)


def take_own_parts(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before a module loads a state dict: of whole tensors for its DTensors, take this process's part. Nothing is sent.

    Args:
        module: whose own parameters are loaded.
        state: changed in place.
        prefix: of the module's names in it.
    """
    fused = getattr(module, "fused_parameters", {})
    for name, parameter in module._parameters.items():
        value = state.get(prefix + name)
        if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or isinstance(value, DTensor):
            continue
        if value.shape != parameter.shape:  # torch names both shapes
            continue
        # A copy: load_state_dict(assign=True) would keep the whole alive.
        part = torch.empty(parameter.to_local().shape, dtype=value.dtype, device=value.device)
        for here, there in own_pieces(with_fused(parameter.detach(), fused.get(name))):
            part[here] = value.detach()[there]
        state[prefix + name] = as_dtensor(part, parameter)
