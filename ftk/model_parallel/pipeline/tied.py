"""One parameter on the first and on the last stage of a pipeline, kept equal by equal gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def sum_tied_gradients(parameters: Iterable[nn.Parameter], peer: int, group: dist.ProcessGroup) -> None:
    """Give both holders of tied parameters the sum of their gradients, bit for bit the same; once an update.

    The initial values are equal, as they are functions of the name. With equal gradients, clipped by one norm, the
    optimizers of both processes keep them so. Nobody but the two takes part.

    Args:
        parameters: in the same order on both; sharded alike, if they are.
        peer: the other one's rank in the group.
        group: of the pipeline.
    """
    other = dist.get_global_rank(group, peer)
    # One after the other: both at once need a batch, and the first batch of an NCCL group all of its processes.
    sends_first = dist.get_rank(group) < peer
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        own = _gradient(parameter)
        received = torch.empty_like(own, memory_format=torch.contiguous_format)
        if sends_first:
            dist.send(own.contiguous(), other, group=group)
        dist.recv(received, other, group=group)
        if not sends_first:
            dist.send(own.contiguous(), other, group=group)
        own.add_(received)


def _gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient of what is this process's of the parameter, to be added to in place; zeros where it was not used."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()
    return parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
