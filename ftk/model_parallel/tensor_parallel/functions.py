"""Megatron's conjugate operators: what is communicated in the forward pass, and its mirror image in the backward.

Shoeybi et al. 2019 (https://arxiv.org/abs/1909.08053) call the first two f and g; Korthikanti et al. 2022
(https://arxiv.org/abs/2205.05198) the sequence-parallel pair g and g-bar. All take plain tensors and a process group,
and each backward is one of these functions again. What is shared along a dimension is cut as `torch.chunk` cuts, and
filled up with zeros to equal parts: rank r holds places r n to (r + 1) n - 1, where n is the
size over the processes, rounded up.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines torch.ops._c10d_functional
from torch import Tensor
from torch.nn import functional as F


def copy_to_region(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """f: values [...] that are the same on every process, into layers that are shared; gradients are summed."""
    return values if group.size() == 1 else _Copy.apply(values, group)


def reduce_from_region(values: Tensor, group: dist.ProcessGroup) -> Tensor:
    """g: the sum of the values [...] of all processes, on every one of them; gradients pass as they are."""
    return values if group.size() == 1 else _Reduce.apply(values, group)


def scatter_to_region(values: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Own part along `dim` of what every process has whole, [.., T, ..] -> [.., n, ..]; gradients are gathered."""
    return values if group.size() == 1 else _Scatter.apply(values, group, dim % values.dim(), False)


def gather_from_region(values: Tensor, group: dist.ProcessGroup, dim: int, length: int | None = None) -> Tensor:
    """The whole of parts along `dim`, [.., n, ..] -> [.., T, ..], for the same work on every process: each takes
    its part of the gradient.

    Args:
        values: [.., n or less, ..]; less where this process's part is the short last one.
        dim: along which.
        length: of the whole, if not group size times n.
    """
    return values if group.size() == 1 else _Gather.apply(values, group, dim % values.dim(), length, False)


def gather_from_sequence_region(values: Tensor, group: dist.ProcessGroup, dim: int, length: int | None) -> Tensor:
    """The whole of parts along `dim`, [.., n, ..] -> [.., T, ..], into layers that are shared: gradients are summed and
    cut into parts again.

    Args: as `gather_from_region`.
    """
    return values if group.size() == 1 else _Gather.apply(values, group, dim % values.dim(), length, True)


def reduce_scatter_to_sequence_region(values: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Own part along `dim` of the sum over processes, [.., T, ..] -> [.., n, ..]; gradients are gathered."""
    return values if group.size() == 1 else _Scatter.apply(values, group, dim % values.dim(), True)


def part_size(length: int, group_size: int) -> int:
    """The places of each process's part, the last ones' filled up."""
    return -(-length // group_size)


def all_reduce(values: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Without a gradient: "sum" or "max" over the group, as a new tensor."""
    # Functional: torch.compile traces it, and selective checkpointing may keep the input.
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(values.contiguous(), operation, group.group_name))


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return reduce_from_region(grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_reduce(values, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return copy_to_region(grad, ctx.group), None


class _Gather(torch.autograd.Function):
    """Parts -> whole. Backward: the sum's part, or the part of what is the same everywhere."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, dim: int, length: int | None, sums: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.sums, ctx.own_length = group, dim, sums, values.size(dim)
        return _all_gather(values, group, dim, length)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cut = reduce_scatter_to_sequence_region if ctx.sums else scatter_to_region
        return cut(grad, ctx.group, ctx.dim).narrow(ctx.dim, 0, ctx.own_length), None, None, None, None


class _Scatter(torch.autograd.Function):
    """Whole -> own part, of the sum or of what is the same everywhere. Backward: the whole of the parts."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup, dim: int, sums: bool) -> Tensor:
        ctx.group, ctx.dim, ctx.sums, ctx.length = group, dim, sums, values.size(dim)
        return _reduce_scatter(values, group, dim) if sums else _local_part(values, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gather = gather_from_sequence_region if ctx.sums else gather_from_region
        return gather(grad, ctx.group, ctx.dim, ctx.length), None, None, None


def _all_gather(values: Tensor, group: dist.ProcessGroup, dim: int, length: int | None) -> Tensor:
    size = group.size()
    if length is not None:
        values = _zero_padded(values, dim, part_size(length, size))
    ops = torch.ops._c10d_functional
    gathered = ops.wait_tensor(ops.all_gather_into_tensor(values.contiguous(), size, group.group_name))
    if dim:  # parts come one after the other along the first dimension
        gathered = gathered.view(size, *values.shape).movedim(0, dim).flatten(dim, dim + 1)
    # Contiguous, as on a single process: modules take views of it.
    return gathered if length is None else gathered.narrow(dim, 0, length).contiguous()


def _reduce_scatter(values: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size = group.size()
    part = part_size(values.size(dim), size)
    values = _zero_padded(values, dim, size * part)
    if dim:
        values = values.unflatten(dim, (size, part)).movedim(dim, 0).flatten(0, 1)
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.reduce_scatter_tensor(values.contiguous(), "sum", size, group.group_name))


def _local_part(values: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    size, rank = group.size(), group.rank()
    part = part_size(values.size(dim), size)
    return _zero_padded(values, dim, size * part).narrow(dim, rank * part, part).contiguous()


def _zero_padded(values: Tensor, dim: int, length: int) -> Tensor:
    missing = length - values.size(dim)
    return F.pad(values, [0, 0] * (values.dim() - 1 - dim) + [0, missing]) if missing else values
