"""Data parallel: each process takes batches of its own, gradients are summed; copies of the model, or shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ftk.errors import UserError
from ftk.model_parallel.blocks import blocks_of
from ftk.model_parallel.config import ParallelConfig
from ftk.model_parallel.step_module import StepModule
from ftk.model_parallel.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def uses_copies(world: World, config: ParallelConfig) -> bool:
    """Whether data parallel is by plain copies of the model (DDP): nothing is sharded in any way, or offloaded."""
    sizes = world.sizes
    return sizes.replicate > 1 and sizes.replicate == sizes.world and not config.cpu_offload


def uses_shares(world: World, config: ParallelConfig) -> bool:
    """Whether data parallel is by FSDP2, which goes with all other dimensions of the mesh."""
    return world.mesh is not None and not uses_copies(world, config) and (world.sizes.data > 1 or config.cpu_offload)


def copy_over_processes(module: nn.Module, world: World, config: ParallelConfig) -> DistributedDataParallel:
    """Wrap a module whose parameters are equal on all processes: each backward pass sums their gradients.

    Parameters stay plain tensors. Sums go out in buckets while the backward pass continues.
    """
    only_dense_gradients(module)
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
            f"--find-unused-parameters, or --freeze what is not to be trained"
        )


def share_over_processes(module: nn.Module, mesh: DeviceMesh, config: ParallelConfig, precision: str) -> None:
    """Shard a module's parameters over processes, in place; see `shard_fully`.

    Args:
        module: as it is called in the step; on the meta device, or with equal values on all processes.
        mesh: of one dimension, over which is sharded; or of two, the first of which holds copies.
        config: stage, offload, types, prefetch.
        precision: of the run; on GPUs with bf16, the blocks' parameters are gathered in bf16 unless `config` says
            otherwise. Under bf16 and fp16 autocast chooses what is computed in which type, so that hidden states
            between blocks stay float32, as on one process; in fp32 all is computed in the gathered type.
    """
    from ftk.model_parallel.fully_sharded import shard_fully

    only_dense_gradients(module)
    gathered = _gather_dtype(config, mesh.device_type, precision)
    blocks = [block for _, block in blocks_of(module)]
    under_autocast = precision != "fp32"
    if under_autocast and gathered is not None and mesh.device_type == "cpu":
        for block in blocks:
            _cast_inputs_of_norms(block)
    shard_fully(
        module,
        blocks,
        mesh,
        zero_stage=config.zero_stage,
        prefetch_blocks=config.prefetch_blocks,
        cpu_offload=config.cpu_offload,
        gather_dtype=gathered,
        reduce_dtype=DTYPES[config.reduce_dtype],
        under_autocast=under_autocast,
        is_step=isinstance(module, StepModule),
    )


def only_dense_gradients(module: nn.Module) -> None:
    """Let a tied embedding make dense gradients: what sums them over processes takes no others."""
    for part in module.modules():
        if hasattr(part, "sparse_gradient"):
            part.sparse_gradient = False  # type: ignore[assignment]


def _cast_inputs_of_norms(block: nn.Module) -> None:
    """On a GPU autocast has norms computed in float32, whatever they are given; on a CPU it leaves them alone, where
    the kernels take no float32 with weights in bf16."""
    for norm in block.modules():
        if isinstance(norm, nn.LayerNorm | nn.GroupNorm) and norm.weight is not None:
            norm.register_forward_pre_hook(_to_weight_dtype)


def _to_weight_dtype(norm: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(argument.to(norm.weight.dtype) for argument in arguments)  # type: ignore[arg-type]


def _gather_dtype(config: ParallelConfig, device_type: str, precision: str) -> torch.dtype | None:
    """None: the parameters' own."""
    if config.gather_dtype != "auto":
        return DTYPES[config.gather_dtype]
    return torch.bfloat16 if precision == "bf16" and device_type == "cuda" else None
