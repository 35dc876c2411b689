"""Data parallel: each rank takes batches of its own, gradients are summed. Here by DDP, with replicas of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftk.errors import UserError
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.world import World


def uses_ddp(world: World, config: ParallelConfig) -> bool:
    """Whether data parallel is by whole replicas of the model: nothing is cut, and no option needs FSDP2."""
    sizes = world.sizes
    return sizes.replicate > 1 and sizes.replicate == sizes.world and not config.needs_fsdp


def uses_fsdp(world: World, config: ParallelConfig) -> bool:
    """Whether FSDP2 shards the parameters, which it can over all dimensions of the mesh, and on one process."""
    return config.needs_fsdp or (world.sizes.data > 1 and not uses_ddp(world, config))


def wrap_in_ddp(module: nn.Module, world: World, config: ParallelConfig) -> DistributedDataParallel:
    """Wrap a module whose parameters are equal on all processes: each backward pass sums their gradients.

    Parameters stay plain tensors. Sums go out in buckets while the backward pass continues.
    """
    make_gradients_dense(module)
    if world.device.type == "cuda":
        # DDP would have torch.compile cut programs where its buckets end. Blocks that are compiled one by one need no
        # cut, and flex attention did not survive it (https://github.com/pytorch/pytorch/issues/137481).
        from torch._dynamo import config as dynamo

        dynamo.optimize_ddp = False
    wrapped = DistributedDataParallel(
        module,
        process_group=world.group("replicate"),
        find_unused_parameters=config.find_unused_parameters,
        init_sync=False,  # the values are functions of the seed, or come from one checkpoint
        gradient_as_bucket_view=True,
    )
    wrapped.register_comm_hook(
        wrapped.process_group, _sum_as(torch.bfloat16 if config.gradient_compression == "bf16" else None)
    )
    return wrapped


def _sum_as(dtype: torch.dtype | None) -> Any:
    """A hook of DDP that sums gradients instead of averaging them; dtype: in which they are sent, None: their own."""

    # Torch's own bf16 hook averages, and DDP refuses it on gloo, which can sum bf16. DDP checks annotations, and takes
    # no strings for them; so this hook has no annotations.
    def hook(group, bucket):  # type: ignore[no-untyped-def]
        work = dist.all_reduce(bucket.buffer().to(dtype or bucket.buffer().dtype), group=group, async_op=True)
        return work.get_future().then(lambda future: bucket.buffer().copy_(future.value()[0]))

    return hook


def require_gradients(model: nn.Module) -> None:
    """Refuse to continue where a parameter has no gradient: DDP waits for it, and sums none of the bucket in which it
    would lie. (One that only the last micro-batch of an update does not use, DDP itself refuses, at the next update.)

    Args:
        model: the inner one, after the backward passes of an update.

    Raises:
        UserError: a parameter that is trained has no gradient.
    """
    named = model.named_parameters()
    if missing := [name for name, parameter in named if parameter.requires_grad and parameter.grad is None]:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"{', '.join(missing[:3])}{others} had no part in the loss and no gradient; give "
            f"`find_unused_parameters`, or `freeze` what is not to be trained"
        )


def make_gradients_dense(module: nn.Module) -> None:
    """Let a tied embedding make dense gradients: what sums them over processes takes no others."""
    for part in module.modules():
        if hasattr(part, "sparse_gradient"):
            part.sparse_gradient = False  # type: ignore[assignment]
