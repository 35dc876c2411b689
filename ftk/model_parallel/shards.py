"""Tensors that may be sharded: this process's part, and the whole of all parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ftk.model_parallel.world import DIMENSIONS

_PLAIN = (Tensor, nn.Parameter)
_T = TypeVar("_T", bound=Tensor)


def is_distributed(tensor: Any) -> bool:
    """Whether a tensor is a DTensor; torch.distributed.tensor, which takes half a second to import, is not needed."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "placements")


def local(tensor: Any) -> Any:
    """This process's part of a tensor: its own memory, not a copy. To be called without gradients."""
    return tensor.to_local() if is_distributed(tensor) else tensor


def locals_of(tensors: Iterable[Any]) -> list[Tensor]:
    """This process's parts, in the same order."""
    return [local(tensor) for tensor in tensors]


def multiply_gradients(parameters: Iterable[nn.Parameter], factor: float | Tensor) -> None:
    """Scale this process's shards of the gradients in place; parameters without a gradient are skipped."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def shard_groups(tensor: Any) -> dict[str, dist.ProcessGroup]:
    """The dimensions of the mesh over which a tensor is cut, with their process groups; none of a plain tensor."""
    if not is_distributed(tensor):
        return {}
    mesh = tensor.device_mesh
    groups = {}
    for place, placement in enumerate(tensor.placements):
        assert not placement.is_partial(), "the tensor is still to be summed"
        if not placement.is_replicate() and mesh.size(place) > 1:
            groups[_dimension(mesh, place)] = mesh.get_group(place)
    return groups


def _dimension(mesh: Any, place: int) -> str:
    """The name of a dimension of a mesh; of one without names its number."""
    return mesh.mesh_dim_names[place] if mesh.mesh_dim_names else str(place)


def sum_over_shards(values: Tensor, tensors: Sequence[Any]) -> Tensor:
    """For each tensor the sum of the values that the processes computed from their parts of it.

    Args:
        values: [N], one of each tensor's local part, such as a sum of squares.
        tensors: N of them; processes that share one call this with the same list.

    Returns:
        [N], the same on every process that shares a tensor.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    cut: dict[str, list[int]] = {}
    for place, tensor in enumerate(tensors):
        for dimension, group in shard_groups(tensor).items():
            groups[dimension] = group
            cut.setdefault(dimension, []).append(place)
    if not groups:
        return values
    parts = list(values.unbind())
    for dimension in sorted(groups, key=depth, reverse=True):
        # Picked one by one: indices would be copied to a GPU, and waited for.
        total = torch.stack([parts[place] for place in cut[dimension]])
        dist.all_reduce(total, group=groups[dimension])
        for place, value in zip(cut[dimension], total.unbind(), strict=True):
            parts[place] = value
    return torch.stack(parts)


def sum_over_dimension(values: Tensor, tensor: Any, dim: int) -> Tensor:
    """Sum partial results over the processes among which one dimension of a tensor is cut.

    Args:
        values: of any shape, changed in place.
        tensor: what they are partial results of.
        dim: of the tensor, from its end: -1 is the last one.
    """
    groups = shard_groups(tensor)
    if groups:
        mesh, cut = tensor.device_mesh, tensor.ndim + dim
        cut_there = {_dimension(mesh, i) for i, p in enumerate(tensor.placements) if getattr(p, "dim", None) == cut}
        for dimension in sorted(cut_there & groups.keys(), key=depth, reverse=True):
            dist.all_reduce(values, group=groups[dimension])
    return values


def as_dtensor(part: Tensor, tensor: Any) -> Any:
    """This process's part of something, as a DTensor that is laid out as another; nothing is sent."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


def whole(part: Tensor, tensor: Any) -> Tensor:
    """All processes' parts of something that is laid out as a tensor is, put together; on every process.

    Args:
        part: this process's.
        tensor: distributed or not.
    """
    return as_dtensor(part, tensor).full_tensor() if is_distributed(tensor) else part


def local_part(value: Tensor, tensor: Any) -> Tensor:
    """This process's part of a whole value, as a tensor of its shape is laid out: the inverse of `whole`."""
    if not is_distributed(tensor):
        return value
    return value[local_ranges(tensor.shape, tensor.device_mesh, tensor.placements)]


def local_ranges(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[slice, ...]:
    """This process's part of a tensor, as the range of each dimension that it has; also of one that is yet to be made.

    Args:
        shape: of the whole.
        mesh, placements: as of a DTensor, of any kind but partial.
    """
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, start = compute_local_shape_and_global_offset(tuple(shape), mesh, placements)
    return tuple(slice(first, first + size) for first, size in zip(start, sizes, strict=True))


@dataclass(frozen=True)
class Fused:
    """Layers concatenated in one tensor, each of which is cut over the same processes.

    The model has them layer by layer, and in each what one process after the other computes. The distributed tensor is
    of the same shape, but lies process by process, and in each layer after layer: so a process's part is one range,
    which FSDP2 may cut further, and of the shape that optimizers go by. What leaves the processes is put in the model's
    order again.

    Attributes:
        dim: along which it is cut.
        num_layers, num_processes: whose product divides the length.
    """

    dim: int
    num_layers: int
    num_processes: int

    def ranges(self, part: slice, length: int) -> Iterator[tuple[slice, slice]]:
        """The pieces of a range of the distributed tensor: (place in the range, place in the model's order)."""
        block = length // (self.num_layers * self.num_processes)
        start = part.start
        while start < part.stop:
            number, inside = divmod(start, block)
            process, layer = divmod(number, self.num_layers)
            stop = min(part.stop, start - inside + block)
            there = (layer * self.num_processes + process) * block + inside
            yield slice(start - part.start, stop - part.start), slice(there, there + stop - start)
            start = stop

    def in_model_order(self, value: Tensor) -> Tensor:
        """A whole distributed value as the model has it."""
        blocks = value.unflatten(self.dim, (self.num_processes, self.num_layers, -1))
        return blocks.transpose(self.dim, self.dim + 1).flatten(self.dim, self.dim + 2)

    def of_state(self, state: Any, parameter: Any) -> Fused | None:
        """How a tensor of the optimizer's lies that belongs to such a parameter; None: it does not have that length."""
        alike = state.ndim == parameter.ndim and state.shape[self.dim] == parameter.shape[self.dim]
        return self if alike and is_distributed(state) else None


def fused_parameters(model: nn.Module) -> dict[int, Fused]:
    """The parameters of a model whose order differs from that of its class, by `id`.

    Read from the modules, because FSDP2 replaces the parameters that a plan made.
    """
    return {
        id(module._parameters[name]): fused
        for module in model.modules()
        for name, fused in getattr(module, "fused_parameters", {}).items()
    }


def with_fused(tensor: _T, fused: Fused | None) -> _T:
    """The same tensor, marked for `local_pieces`; what is computed from it is not."""
    if fused is not None:
        tensor.ftk_fused = fused  # type: ignore[attr-defined]
    return tensor


def fused_of(tensor: Any) -> Fused | None:
    """What a tensor was marked with."""
    fused: Fused | None = getattr(tensor, "ftk_fused", None)
    return fused


def local_pieces(tensor: Any) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """What this process has of a tensor, as boxes: (place in its part, place in the whole as the model has it)."""
    places = tuple(slice(0, size) for size in tensor.shape)
    if is_distributed(tensor):
        places = local_ranges(tensor.shape, tensor.device_mesh, tensor.placements)
    part = tuple(slice(0, place.stop - place.start) for place in places)
    fused = fused_of(tensor)
    if fused is None:
        return [(part, places)]
    dim = fused.dim
    return [
        ((*part[:dim], here, *part[dim + 1 :]), (*places[:dim], there, *places[dim + 1 :]))
        for here, there in fused.ranges(places[dim], tensor.shape[dim])
    ]


def depth(dimension: str) -> int:
    """Where a dimension lies in the mesh, 0 the outermost; one that is not of ours counts as outermost."""
    return DIMENSIONS.index(dimension) if dimension in DIMENSIONS else -1


def canonical_name(name: str, model: Any) -> str:
    """A parameter's own name: without what DDP, torch.compile and activation checkpointing put into its path."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        name = name.removeprefix("module.")
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "_checkpoint_wrapped_module"))
